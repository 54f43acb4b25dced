"""The verification of objectives: exact where theory says so, and wrong ones are found and named."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch import Tensor

from slime_like.algorithms import LossInputs, PolicyTerms, Promise, SampleGroups, estimator, find_estimator, importance
from slime_like.algorithms.losses import kl, surrogates
from slime_like.commands.main import main
from slime_like.config import RunConfig
from slime_like.config.reading.load import load_config
from slime_like.plugins.objective import ADVANTAGES, LOSSES, REDUCTIONS
from slime_like.verification import objective as verify
from slime_like.verification.objective import PartResult, sentences, verify_objective, verify_parts

HERE = Path(__file__)
LENGTH = 8
CONSTANT = {"name": "constant", "length": LENGTH}
EXACT = {"loss": "policy_gradient", "advantage": "rloo", "reduction": CONSTANT}
TURNS = {"environment": {"name": "calculator"}}


def configured(algorithm: dict[str, Any], **sections: Any) -> RunConfig:
    return RunConfig(run_dir=Path("run"), model={"path": Path("model")}, algorithm=algorithm, **sections)


def findings(
    algorithm: dict[str, Any], rollout: dict[str, Any] | None = None, **sections: Any
) -> dict[tuple[str, str, str], PartResult]:
    found = verify_objective(configured(algorithm, rollout=rollout or {}, **sections))
    return {(each.scenario, each.tree, each.part): each for each in found}


def on_policy(
    algorithm: dict[str, Any], *rollout: dict[str, Any], update: float = 0.0, **sections: Any
) -> dict[tuple[str, str], PartResult]:
    """Return findings by tree and part, without the enumerations of other scenarios, or after an update."""
    with mock.patch.object(verify, "scenarios", lambda *read: [verify.Scenario(verify.ON_POLICY, update=update)]):
        found = findings(algorithm, *rollout, **sections)
    return {(tree, part): each for (_, tree, part), each in found.items()}


# ------------------------------------------------------------------------------------------------------ what is exact
def test_distillation_follows_the_reverse_kl() -> None:
    teacher = {"coef": 0.5, "path": "/teacher"}
    found = on_policy(EXACT, TURNS, distillation=teacher)
    for tree in ("one turn", "two turns"):
        part = found[tree, "distillation"]
        assert part.is_unbiased and part.scale == pytest.approx(found[tree, "reward"].scale)
    biased = on_policy(EXACT | {"reduction": "tokens"}, TURNS, distillation=teacher)
    assert biased["two turns", "distillation"].bias > 1e-3
    teacher = {"coef": 0.5, "path": "/teacher", "mode": "exact"}
    for advantage in ("rloo", "grpo_mean_only"):
        found = on_policy(EXACT | {"advantage": advantage}, TURNS, distillation=teacher)
        for tree in ("one turn", "two turns"):
            part = found[tree, "distillation"]
            assert part.is_unbiased and part.scale == pytest.approx(1 / LENGTH, rel=1e-12)


@pytest.mark.parametrize(("advantage", "scale"), [("rloo", 1.0), ("grpo_mean_only", 2 / 3), ("pass_at_k", 1 / 3)])
def test_estimators_that_are_exact_up_to_a_factor(advantage: str, scale: float) -> None:
    """Groups have 3 samples: a mean that includes the sample itself shrinks the gradient by (3 - 1) / 3."""
    found = on_policy(EXACT | {"advantage": advantage}, TURNS)
    for tree in ("one turn", "two turns"):
        reward = found[tree, "reward"]
        assert reward.bias < 1e-12 and reward.scale == pytest.approx(scale / LENGTH, rel=1e-12)


def test_kl_and_entropy_of_visited_states_are_exact() -> None:
    found = on_policy(EXACT | {"kl": {"coef": 0.1, "estimator": "k2"}, "entropy_coef": 0.2})
    for part in ("kl", "entropy"):
        each = found["one turn", part]
        assert each.bias < 1e-12 and each.scale == pytest.approx(1 / LENGTH, rel=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_kl_in_the_reward_is_exact(estimator: str) -> None:
    """The sum of k1 is the log ratio of the response. The sum of k3 is not, and has another gradient."""
    found = on_policy(EXACT | {"kl_reward": {"coef": 0.1, "estimator": estimator}})["one turn", "reward"]
    assert (found.bias < 1e-12) == (estimator == "k1")


def test_whole_sequence_weights_are_exact_with_stale_samples() -> None:
    importance = {"correction": "mask", "level": "sequence", "low": 0.0, "high": 1e300}
    found = findings(EXACT | {"importance": importance}, {"max_staleness": 1})
    assert {each.scenario for each in found.values()} == {"on-policy", "engine rounds", "stale samples"}
    assert all(each.bias < 1e-12 for each in found.values())


# ------------------------------------------------------------------------------------------------ biases by their names
def test_each_bias_has_the_name_of_its_setting() -> None:
    named: dict[str, dict[str, Any]] = {
        "algorithm.advantage=grpo": {"advantage": "grpo"},
        "algorithm.advantage=opo": {"advantage": "opo"},
        "algorithm.reduction=samples": {"reduction": "samples"},
        "algorithm.reduction=tokens": {"reduction": "tokens"},
        "algorithm.kl.estimator=k3": {"kl": {"coef": 0.1}},
    }
    for term, setting in named.items():
        found = on_policy(EXACT | setting)
        biased = [each for each in found.values() if each.bias > 1e-3]
        assert [list(each.terms) for each in biased] == [[term]]
        assert biased[0].terms[term] < 1e-12 and not biased[0].is_wrong


def test_biases_of_baselines_critics_and_ratios_are_named() -> None:
    """The first turn's reward is earned before the second turn, so a turn's own return has less variance."""
    exact = on_policy(EXACT | {"advantage": "turn_rloo"}, TURNS)["two turns", "reward"]
    assert exact.bias < 1e-12 and exact.scale == pytest.approx(1 / LENGTH, rel=1e-12)
    biased = on_policy(EXACT | {"advantage": "turn_index_mean"}, TURNS)["two turns", "reward"]
    assert biased.bias > 1e-2 and list(biased.terms) == ["algorithm.advantage=turn_index_mean"]
    for lam, talks in ((0.0, {}), (0.7, TURNS)):
        found = on_policy(EXACT | {"advantage": {"name": "gae", "lam": lam}}, talks)
        assert all(each.bias < 1e-12 for each in found.values())
    discounted = on_policy(EXACT | {"advantage": {"name": "gae", "gamma": 0.5}})["one turn", "reward"]
    assert discounted.bias > 1e-2 and "algorithm.advantage=gae" in discounted.terms
    dropped = on_policy(EXACT, {"drop_zero_spread": True})["one turn", "reward"]
    assert list(dropped.terms) == ["rollout.drop_zero_spread=true"]
    late = on_policy(EXACT | {"loss": "ppo_clip"}, update=0.1)["one turn", "reward"]
    assert list(late.terms) == ["algorithm.loss=ppo_clip"] and late.terms["algorithm.loss=ppo_clip"] < 1e-12


# ------------------------------------------------------------------------------------------ wrong ones, made on purpose
def loss_of(value: Callable[[LossInputs, Tensor, Tensor], Tensor]) -> type:
    """Make a loss whose tokens have this value, given the inputs, the advantages and the old logprobs."""

    @dataclass(frozen=True)
    class Loss:
        name: ClassVar[str] = "own"
        needs_old: ClassVar[bool] = True
        needs_advantages: ClassVar[bool] = True
        promise: ClassVar[Promise] = Promise()
        per_sequence: ClassVar[bool] = False

        def __call__(self, inputs: LossInputs) -> PolicyTerms:
            assert inputs.advantages is not None and inputs.old_logprobs is not None
            return PolicyTerms(value(inputs, inputs.advantages, inputs.old_logprobs))

    return Loss


def lengths(inputs: LossInputs) -> Tensor:
    assert inputs.response_lens is not None
    return inputs.response_lens.repeat_interleave(inputs.response_lens)


Reinforce = loss_of(lambda inputs, advantages, old: -advantages * inputs.logprobs)
Descends = loss_of(lambda inputs, advantages, old: advantages * inputs.logprobs)
Detached = loss_of(lambda inputs, advantages, old: -advantages * inputs.logprobs.detach() + 0 * inputs.logprobs)
Inverted = loss_of(lambda inputs, advantages, old: -advantages * (old - inputs.logprobs).exp())
OnlyGood = loss_of(lambda inputs, advantages, old: -advantages.clamp_min(0) * inputs.logprobs)
TwiceMean = loss_of(lambda inputs, advantages, old: -advantages * inputs.logprobs / lengths(inputs))
Probability = loss_of(lambda inputs, advantages, old: -advantages * inputs.logprobs.exp())


@estimator("group", promise=Promise())
def leave_one_out(rewards: Tensor, groups: SampleGroups) -> Tensor:
    return (rewards - groups.mean(rewards)) * 1.5


@estimator("group", promise=Promise())
def own_reward_in_baseline(rewards: Tensor, groups: SampleGroups) -> Tensor:
    return rewards - groups.max(rewards)


@estimator("group", promise=Promise())
def sign(rewards: Tensor, groups: SampleGroups) -> Tensor:
    return (rewards - groups.mean(rewards)).sign()


def negative_k2(difference: Tensor) -> Tensor:
    return -0.5 * difference.square()


def k1_with_another_name(difference: Tensor) -> Tensor:
    return difference


@Promise()
def inverse_weight(ratio: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    return 1 / ratio, torch.zeros_like(ratio, dtype=torch.bool)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "Descends": ({"loss": f"{HERE}:Descends"}, "reward"),
    "Detached": ({"loss": f"{HERE}:Detached"}, "reward"),
    "Inverted": ({"loss": f"{HERE}:Inverted"}, "reward"),
    "OnlyGood": ({"loss": f"{HERE}:OnlyGood"}, "reward"),
    "TwiceMean": ({"loss": f"{HERE}:TwiceMean"}, "reward"),
    "Probability": ({"loss": f"{HERE}:Probability"}, "reward"),
    "own_reward_in_baseline": ({"advantage": f"{HERE}:own_reward_in_baseline"}, "reward"),
    "sign": ({"advantage": f"{HERE}:sign"}, "reward"),
    "negative_k2": ({"kl": {"coef": 0.1, "estimator": f"{HERE}:negative_k2"}}, "kl"),
    "k1_with_another_name": ({"kl": {"coef": 0.1, "estimator": f"{HERE}:k1_with_another_name"}}, "kl"),
    "inverse_weight": ({"importance": {"correction": f"{HERE}:inverse_weight"}}, "reward"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_objective_is_found_and_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "_exact_terms", lambda config: ())  # of built-in parts
    setting, part = WRONG[name]
    kept = [each for each in verify_parts(configured(EXACT | setting)) if each.is_wrong]
    wrong = [*kept, *(each for each in on_policy(EXACT | setting).values() if each.is_wrong)]
    assert wrong and {each.part for each in wrong} == {part}
    assert all(each.scenario.partition(",")[0].endswith(f":{name}") for each in kept)
    assert all("WRONG" in line for line in sentences(wrong))


@estimator("group")
def above_mean(rewards: Tensor, groups: SampleGroups) -> Tensor:
    return (rewards - groups.mean(rewards)).clamp_min(0)


def test_right_and_unexcluded_biases_are_told_apart() -> None:
    setting = f"{HERE}:above_mean"
    assert setting not in "".join(sentences([*verify_parts(configured(EXACT | {"advantage": setting}))]))
    found = on_policy(EXACT | {"advantage": setting})["one turn", "reward"]
    assert found.bias > 0.01 and list(found.terms) == [f"algorithm.advantage={setting}"] and not found.is_wrong
    found = PartResult("on-policy", "one turn", "reward", 1.0, 2e-8, {"algorithm.whiten=true": 1e-17})
    (line,) = sentences([found])
    assert "biased by 2e-06% of" in line and "(0% if it were exact)" in line
    found = on_policy(EXACT | {"loss": f"{HERE}:Reinforce", "advantage": f"{HERE}:leave_one_out"})
    assert not any(each.is_wrong for each in found.values())
    assert found["one turn", "reward"].is_unbiased


# ----------------------------------------------------------------------------------------------------- built-in parts
PENALTIES: list[dict[str, Any]] = [
    *({"kl": {"coef": 0.2, "estimator": name}} for name in ("k2", "k3", "low_var_kl")),
    *({"kl": {"coef": 0.2, "estimator": name, "importance_weighted": True}} for name in ("k1", "k3", "low_var_kl")),
    {"kl": {"coef": 0.2, "estimator": "k1", "straight_through": True}},
    {"kl_reward": {"coef": 0.2}, "entropy_coef": 0.1},
    *({"importance": {"correction": name, "level": "token"}} for name in ("truncate", "clip", "mask")),
    *({"importance": {"correction": "truncate", "level": level}} for level in ("sequence", "geometric")),
]
BUILT_IN: list[dict[str, Any]] = [
    *({"loss": name} for name in LOSSES),
    *({"loss": "policy_gradient", "advantage": name} for name in ADVANTAGES),
    *({"reduction": CONSTANT if name == "constant" else name, "advantage": "pass_through"} for name in REDUCTIONS),
    *({"loss": "policy_gradient", "advantage": "pass_through"} | each for each in PENALTIES),
]


@pytest.mark.parametrize("setting", BUILT_IN, ids=str)
def test_a_built_in_part_keeps_its_promise(setting: dict[str, Any]) -> None:
    found = list(verify_parts(configured(setting)))
    assert len(found) >= 3 - (setting.get("loss") == "sft") + ("kl" in setting) + ("importance" in setting)
    assert not any(each.is_wrong for each in found)


def test_promises_hold_for_default_options() -> None:
    """A critic's discount, equal rewards or a tight clip bias the whole gradient, which is reported, and no mistake."""
    for setting in ({"advantage": {"name": "gae", "gamma": 0.5}}, {"loss": {"name": "ppo_clip", "clip_low": 0.0}}):
        assert not any(each.is_wrong for each in verify_parts(configured(EXACT | setting)))


def recoded(patch: pytest.MonkeyPatch, function: Any, planted: Callable[..., Any]) -> None:
    patch.setattr(function, "__code__", planted.__code__)


def swapped_ratio(patch: pytest.MonkeyPatch) -> None:
    right = importance.log_ratio
    patch.setattr(importance, "log_ratio", lambda logprobs, others: right(others, logprobs))


def inverted_ratio(patch: pytest.MonkeyPatch) -> None:
    right = surrogates.token_ratio
    patch.setattr(surrogates, "token_ratio", lambda inputs: 1 / right(inputs))


def no_mask(patch: pytest.MonkeyPatch) -> None:
    right = LossInputs.cleaned
    every = lambda inputs: replace(inputs, loss_mask=torch.ones_like(inputs.loss_mask))  # noqa: E731
    patch.setattr(LossInputs, "cleaned", lambda inputs: right(every(inputs)))


def of_estimator(name: str, factor: float) -> Callable[[pytest.MonkeyPatch], None]:
    """Return a bug that multiplies the advantages of an estimator."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        right = find_estimator(name)
        scaled = replace(right, compute=lambda *given, **options: factor * right.compute(*given, **options))
        patch.setattr(sys.modules[right.compute.__module__], name, scaled)

    return plant


# The bug, flags, and the start of the line that names it.
PLANTED: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], str, str]] = {
    "k3 of the other direction": (
        lambda patch: recoded(patch, kl.k3, lambda difference: torch.expm1(difference) - difference),
        "--algorithm.kl.coef 0.1",
        "kl.estimator=k3: ",
    ),
    "an inverted importance weight": (
        swapped_ratio,
        "--algorithm.importance.correction truncate",
        "importance.correction=truncate, ",
    ),
    "an inverted weight of whole responses": (
        swapped_ratio,
        "--algorithm.importance.correction mask --algorithm.importance.level sequence",
        "importance.correction=mask, ",
    ),
    "an inverted ratio": (inverted_ratio, "--algorithm.loss cispo", "loss=cispo, moved by "),
    "rloo without n/(n-1)": (of_estimator("rloo", 2 / 3), "--algorithm.advantage rloo", "advantage=rloo: "),
    "half of grpo": (of_estimator("grpo", 0.5), "--algorithm.advantage grpo", "advantage=grpo: "),
    "k2 without the half": (
        lambda patch: recoded(patch, kl.k2, lambda difference: difference.square()),
        "--algorithm.kl.coef 0.1 --algorithm.kl.estimator k2",
        "kl.estimator=k2: ",
    ),
    "a dropped loss mask": (no_mask, "--algorithm.loss ppo_clip", "loss=ppo_clip: "),
    "a dropped loss mask, with a ratio per sequence": (no_mask, "--algorithm.loss gspo", "loss=gspo: "),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_ends_the_command_with_1(
    bug: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verify, "scenarios", lambda *read: [])
    plant, flags, named = PLANTED[bug]
    assert main(["verify", "objective", *flags.split()]) == 0
    capsys.readouterr()
    plant(monkeypatch)
    assert main(["verify", "objective", *flags.split()]) == 1
    wrong = [line for line in capsys.readouterr().out.splitlines() if "WRONG" in line]
    assert any(line.startswith(f"algorithm.{named}") for line in wrong)


# -------------------------------------------------------------------------------------------------------- the command
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "scenarios", lambda *read: [verify.Scenario(verify.ON_POLICY)])
    file = tmp_path / "run.yaml"
    file.write_text("run_dir: r\nmodel: {path: m}\nalgorithm: {loss: policy_gradient, advantage: rloo}\n")
    assert main(["verify", "objective", str(file), "--algorithm.reduction", str(CONSTANT).replace("'", "")]) == 0
    assert "on-policy, one turn: reward: unbiased, 0.125 times the true gradient" in capsys.readouterr().out
    assert main(["verify", "objective", str(file), "--algorithm.loss", f"{HERE}:Descends"]) == 1
    capsys.readouterr()
    for loss in ("sft", "clip_cov"):  # only parts are enumerated
        assert main(["verify", "objective", "--algorithm.loss", loss]) == 0
        assert f"algorithm.loss={loss}: 1 times the gradient of the" in capsys.readouterr().out
    assert main(["verify", "objective", "--algorithm.loss.clip_high", "-0.3"]) == 2
    assert "algorithm.loss.clip_high=-0.3" in capsys.readouterr().err


RECIPES = sorted(Path("configs").glob("*.yaml"))


@pytest.mark.acceptance
def test_every_recipe_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "_exact_terms", lambda config: ())  # which name a bias, and do not decide
    configs = [load_config(path, ["--model.path", "m", "--data.train", "d.jsonl"], Path("run")) for path in RECIPES]
    different = {str((config.algorithm, config.rollout.max_staleness > 0)): config for config in configs}
    assert len(different) > 4
    for config in different.values():
        found = [*verify_parts(config), *(() if config.supervised else verify_objective(config))]
        assert len(found) > 1 and not any(finding.is_wrong for finding in found)
