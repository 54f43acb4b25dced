"""The verification of objectives: exact where theory says so, and wrong ones are found and named."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from torch import Tensor

from slime_like.algorithms import Groups, LossInputs, PolicyTerms, estimator
from slime_like.commands.main import main
from slime_like.config import RunConfig
from slime_like.config.reading.load import load_config
from slime_like.verification.objective import verify
from slime_like.verification.objective.verify import Finding, sentences, verify_objective

HERE = Path(__file__)
LENGTH = 8
CONSTANT = {"name": "constant", "length": LENGTH}
EXACT = {"loss": "policy_gradient", "advantage": "rloo", "reduction": CONSTANT}
TURNS = {"environment": {"name": "calculator"}}


def findings(
    algorithm: dict[str, Any], rollout: dict[str, Any] | None = None, **sections: Any
) -> dict[tuple[str, str, str], Finding]:
    sections |= {"algorithm": algorithm, "rollout": rollout or {}}
    config = RunConfig(run_dir=Path("run"), model={"path": Path("model")}, **sections)
    return {(each.scenario, each.tree, each.part): each for each in verify_objective(config)}


def on_policy(algorithm: dict[str, Any], *rollout: dict[str, Any], **sections: Any) -> dict[tuple[str, str], Finding]:
    """Return findings by tree and part, without the enumerations of other scenarios."""
    with mock.patch.object(verify, "scenarios", lambda *read: [verify.Scenario(verify.ON_POLICY)]):
        found = findings(algorithm, *rollout, **sections)
    return {(tree, part): each for (_, tree, part), each in found.items()}


# ------------------------------------------------------------------------------------------------------ what is exact
def test_distillation_follows_the_reverse_kl_at_every_position() -> None:
    teacher = {"coef": 0.5, "path": "/teacher"}
    found = on_policy(EXACT, TURNS, distillation=teacher)
    for tree in ("one turn", "two turns"):
        part = found[tree, "distillation"]
        assert part.is_unbiased and part.scale == pytest.approx(found[tree, "reward"].scale)
    biased = on_policy(EXACT | {"reduction": "tokens"}, TURNS, distillation=teacher)
    assert biased["two turns", "distillation"].bias > 1e-3


def test_exact_distillation_does_so_for_any_scale_of_advantages() -> None:
    teacher = {"coef": 0.5, "path": "/teacher", "mode": "exact"}
    for advantage in ("rloo", "grpo_mean_only"):
        found = on_policy(EXACT | {"advantage": advantage}, TURNS, distillation=teacher)
        for tree in ("one turn", "two turns"):
            part = found[tree, "distillation"]
            assert part.is_unbiased and part.scale == pytest.approx(1 / LENGTH, rel=1e-12)


@pytest.mark.parametrize(
    ("advantage", "scale"),
    [
        *(("rloo", 1.0), ("grpo_mean_only", 2 / 3), ("pass_through", 1.0), ("pass_at_k", 1 / 3)),
        *(("remax", 1.0), ("optimal_token_baseline", 1.0)),
    ],
)
def test_estimators_that_are_exact_up_to_a_factor(advantage: str, scale: float) -> None:
    """Groups have 3 samples: a mean that includes the sample itself shrinks the gradient by (3 - 1) / 3."""
    found = on_policy(EXACT | {"advantage": advantage}, TURNS)
    for tree in ("one turn", "two turns"):
        reward = found[tree, "reward"]
        assert reward.bias < 1e-12 and reward.scale == pytest.approx(scale / LENGTH, rel=1e-12)


@pytest.mark.parametrize("loss", ["ppo_clip", "cispo", "sapo", "dppo_tv", "dppo_kl", "dro"])
def test_losses_of_tokens_are_exact_on_policy(loss: str) -> None:
    assert on_policy(EXACT | {"loss": loss})["one turn", "reward"].bias < 1e-12


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
    named = {
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


def test_a_baseline_per_turn_index_is_biased_and_one_of_whole_returns_is_not() -> None:
    """The first turn's reward is earned before the second turn, so a turn's own return has less variance."""
    exact = on_policy(EXACT | {"advantage": "turn_rloo"}, TURNS)["two turns", "reward"]
    assert exact.bias < 1e-12 and exact.scale == pytest.approx(1 / LENGTH, rel=1e-12)
    biased = on_policy(EXACT | {"advantage": "turn_index_mean"}, TURNS)["two turns", "reward"]
    assert biased.bias > 1e-2 and list(biased.terms) == ["algorithm.advantage=turn_index_mean"]


def test_gae_of_an_exact_critic_is_unbiased_without_a_discount() -> None:
    for lam, talks in ((0.0, {}), (1.0, {}), (0.7, TURNS)):
        found = on_policy(EXACT | {"advantage": {"name": "gae", "lam": lam}}, talks)
        assert all(each.bias < 1e-12 for each in found.values())
    discounted = on_policy(EXACT | {"advantage": {"name": "gae", "gamma": 0.5}})["one turn", "reward"]
    assert discounted.bias > 1e-2 and "algorithm.advantage=gae" in discounted.terms


def test_dropped_groups_and_token_ratios_are_named() -> None:
    dropped = on_policy(EXACT, {"drop_zero_spread": True})["one turn", "reward"]
    assert list(dropped.terms) == ["rollout.drop_zero_spread=true"]
    late = findings(EXACT | {"loss": "ppo_clip", "minibatches": 2})["later update", "one turn", "reward"]
    assert list(late.terms) == ["algorithm.loss=ppo_clip"] and late.terms["algorithm.loss=ppo_clip"] < 1e-12


# ------------------------------------------------------------------------------------------ wrong ones, made on purpose
def loss_of(value: Callable[[LossInputs, Tensor, Tensor], Tensor]) -> type:
    """Make a loss whose tokens have this value, given the inputs, the advantages and the old logprobs."""

    @dataclass(frozen=True)
    class Loss:
        name: ClassVar[str] = "own"
        needs_old: ClassVar[bool] = True
        needs_advantages: ClassVar[bool] = True
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


@estimator("group")
def leave_one_out(rewards: Tensor, groups: Groups) -> Tensor:
    return (rewards - groups.mean(rewards)) * 1.5


@estimator("group")
def own_reward_in_baseline(rewards: Tensor, groups: Groups) -> Tensor:
    return rewards - groups.max(rewards)


@estimator("group")
def sign(rewards: Tensor, groups: Groups) -> Tensor:
    return (rewards - groups.mean(rewards)).sign()


def negative_k2(difference: Tensor) -> Tensor:
    return -0.5 * difference.square()


def k1_with_another_name(difference: Tensor) -> Tensor:
    return difference


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
    wrong = [each for each in findings(EXACT | setting).values() if each.is_wrong]
    assert wrong and {each.part for each in wrong} == {part}
    assert all(not each.scale > 1e-12 or any(term.endswith(f":{name}") for term in each.worse) for each in wrong)
    assert all("WRONG" in line for line in sentences(wrong))


def test_a_small_bias_is_not_shown_as_none() -> None:
    found = Finding("on-policy", "one turn", "reward", 1.0, 2e-8, {"algorithm.whiten=true": 1e-17})
    (line,) = sentences([found])
    assert "biased by 2e-06% of" in line and "(0% if it were exact)" in line


def test_a_right_objective_of_ones_own_passes() -> None:
    found = findings(EXACT | {"loss": f"{HERE}:Reinforce", "advantage": f"{HERE}:leave_one_out"})
    assert not any(each.is_wrong for each in found.values())
    assert found["on-policy", "one turn", "reward"].is_unbiased


# -------------------------------------------------------------------------------------------------------- the command
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("run_dir: r\nmodel: {path: m}\nalgorithm: {loss: policy_gradient, advantage: rloo}\n")
    assert main(["verify", "objective", str(file), "--algorithm.reduction", str(CONSTANT).replace("'", "")]) == 0
    assert "on-policy, one turn: reward: unbiased, 0.125 times the true gradient" in capsys.readouterr().out
    assert main(["verify", "objective", str(file), "--algorithm.loss", f"{HERE}:Descends"]) == 1
    for loss in ("sft", "clip_cov"):
        assert main(["verify", "objective", "--algorithm.loss", loss]) == 2
    assert main(["verify", "objective", "--algorithm.loss.clip_high", "-0.3"]) == 2
    assert "algorithm.loss.clip_high=-0.3" in capsys.readouterr().err


RECIPES = sorted(Path("configs").glob("*.yaml"))


def test_every_recipe_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "_exact_terms", lambda config: ())  # which name a bias, and do not decide
    configs = [load_config(path, ["--model.path", "m", "--data.train", "d.jsonl"], Path("run")) for path in RECIPES]
    sampled = [config for config in configs if not config.supervised]
    different = {str((config.algorithm, config.rollout.max_staleness > 0)): config for config in sampled}
    assert len(different) > 3
    for config in different.values():
        assert not any(finding.is_wrong for finding in verify_objective(config))
