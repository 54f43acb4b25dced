"""Properties of a trainer besides parity: scoring agrees with training, failures, the reference, the schedule."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from backends.megatron.trainer import MegatronTrainer
from slime_like.algorithms.packing.pack import pack_sequences, real_tokens, zero_weight_pack
from slime_like.config import RunConfig
from slime_like.config.roles import Roles
from slime_like.errors import TrainerError
from slime_like.interfaces import RankPlacement
from slime_like.trajectory import PackedTrajectory
from tests.parallel.ranks import run_by_size, run_each, run_ranks
from tests.parallel.reference import Reference
from tests.parallel.steps import gradients_in, running, take_step, weights_of
from tests.parallel.tiny import save_checkpoint, scored_sequences, tiny_config

LENGTHS = [(5, 9), (3, 1), (11, 6), (2, 17)]


def _config(checkpoint: Path, run_dir: Path, layout: dict[str, Any] | None = None, **sections: Any) -> RunConfig:
    trainer = {"step_timeout_s": 30.0, "optimizer": {"lr": 1e-3}, **sections.pop("trainer", {})}
    return tiny_config(checkpoint, run_dir, layout, trainer=trainer, **sections)


def _same(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def _refused(action: Callable[..., object], *arguments: object) -> str:
    with pytest.raises(TrainerError) as caught:
        action(*arguments)
    return str(caught.value)


# ------------------------------------------------------------------------------------------------------- same code path
def _trained_once(
    placement: RankPlacement, config: RunConfig, pack: PackedTrajectory
) -> tuple[list[Tensor], Tensor | None]:
    with running(placement, config) as trainer:
        pack.old_logprobs = None
        if config.algorithm.scores_policy:
            scored = trainer.score([pack])
            pack.old_logprobs = None if scored is None else scored[0]["old_logprobs"]
        take_step(trainer, [pack], float(pack.loss_mask.sum()), last=True)
        return weights_of(trainer), pack.old_logprobs


def test_the_only_update_of_a_batch_computes_its_old_logprobs(qwen3: Path, tmp_path: Path) -> None:
    """Old logprobs and the update, with importance correction, are the same with and without a scoring pass."""
    pack, tasks = pack_sequences(scored_sequences(LENGTHS)), {}
    layouts: list[dict[str, Any]] = [{}, {"tensor": 2, "sequence": True}, {"pipeline": 2}, {"context": 2}]
    for number, layout in enumerate(layouts):
        for source in ("score", "auto"):
            algorithm: dict[str, Any] = {"importance": {"correction": "truncate"}, "old_logprobs": source}
            tasks[number, source] = _config(qwen3, tmp_path, layout, algorithm=algorithm), pack
    found = run_by_size(_trained_once, tmp_path / "ranks", tasks)
    for number in range(len(layouts)):
        scored, own = found[number, "score"], found[number, "auto"]
        for (weights, state), (own_weights, old) in zip(scored, own, strict=True):
            assert (state is None) == (old is None)
            if state is not None and old is not None:
                torch.testing.assert_close(old, state, atol=1e-6, rtol=0)
            for ours, theirs in zip(own_weights, weights, strict=True):
                torch.testing.assert_close(ours, theirs, atol=1e-7, rtol=1e-6)
        assert any(old is not None for _, old in own)


# -------------------------------------------------------------------------------------------------------- nothing added
def _gradients_with_and_without_filling(
    placement: RankPlacement, config: RunConfig, pack: PackedTrajectory
) -> tuple[list[Tensor], list[Tensor]]:
    found = []
    with running(placement, config) as trainer:
        for window in ([pack], [pack, zero_weight_pack(pack)]):
            trainer.begin_step()
            trainer.accumulate(window)
            trainer.finalize_gradients(7.0)
            found.append(gradients_in(trainer))
    return found[0], found[1]


def test_zero_weight_micro_batches_add_exactly_nothing(qwen3: Path, tmp_path: Path) -> None:
    pack = pack_sequences(scored_sequences(LENGTHS))
    config = _config(qwen3, tmp_path, algorithm={"kl": {"coef": 0.1}, "entropy_coef": 0.1})
    ((alone, filled),) = run_ranks(_gradients_with_and_without_filling, 1, tmp_path / "ranks", config, pack)
    assert any(gradient.any() for gradient in alone)
    assert _same(alone, filled)


# ------------------------------------------------------------------------------------------------------------- failures
def _bad_step(
    placement: RankPlacement, config: RunConfig, packs: list[PackedTrajectory], good: PackedTrajectory
) -> tuple[str, bool, bool]:
    """Return the error, whether the weights stayed the same, and whether a good step then changes them."""
    with running(placement, config) as trainer:
        before = weights_of(trainer)
        message = _refused(take_step, trainer, [packs[trainer.coordinates.data]], 10.0)
        unchanged = _same(before, weights_of(trainer))
        take_step(trainer, [good], 10.0)
        return message, unchanged, not _same(before, weights_of(trainer))


def test_a_loss_that_is_not_finite_stops_every_rank_and_updates_nothing(qwen3: Path, tmp_path: Path) -> None:
    good, bad = (pack_sequences(scored_sequences(LENGTHS)) for _ in range(2))
    assert bad.advantages is not None
    bad.advantages[0] = float("nan")
    bad.loss_mask[0], bad.token_weights[0] = True, 1.0
    config = _config(qwen3, tmp_path, {"data": 2})
    for message, unchanged, recovered in run_ranks(_bad_step, 2, tmp_path / "ranks", config, [good, bad], good):
        assert message.startswith("rank 1, forward of micro-batch 0: the loss is not finite")
        assert unchanged and recovered


def test_a_gradient_norm_that_is_not_finite_updates_nothing(qwen3: Path, tmp_path: Path) -> None:
    good, bad = (pack_sequences(scored_sequences(LENGTHS)) for _ in range(2))
    bad.token_weights *= 1e34  # the loss stays finite, but the squares of its gradient don't
    config = _config(qwen3, tmp_path)
    ((message, unchanged, recovered),) = run_ranks(_bad_step, 1, tmp_path / "ranks", config, [bad], good)
    assert message.startswith("rank 0, gradient reduction: the gradient norm is inf")
    assert unchanged and recovered


def _lonely_step(placement: RankPlacement, config: RunConfig, pack: PackedTrajectory) -> str:
    trainer = MegatronTrainer(config, placement)
    trainer.setup()
    if placement.rank == 1:
        time.sleep(2 * config.trainer.step_timeout_s)
        return "slept"
    return _refused(trainer.score, [pack])


def test_a_rank_whose_partner_hangs_fails_in_bounded_time_and_names_the_phase(qwen3: Path, tmp_path: Path) -> None:
    pack = pack_sequences(scored_sequences(LENGTHS))
    config = _config(qwen3, tmp_path, {"tensor": 2}, trainer={"step_timeout_s": 5.0})  # also for setup
    message, _ = run_ranks(_lonely_step, 2, tmp_path / "ranks", config, pack)
    assert message.startswith("rank 0, score: ")


def _misused(placement: RankPlacement, config: RunConfig, pack: PackedTrajectory) -> dict[str, str]:
    """Return the errors of calls that do not fit the step."""
    with running(placement, config) as trainer:
        found = {"reference": _refused(trainer.score, [pack], "reference"), "scale": _refused(trainer.begin_step)}
        trainer.begin_step(7.0, real_tokens([pack]))
        trainer.accumulate([pack], last=True)
        found["window"] = _refused(trainer.accumulate, [pack])
        return {**found, "other scale": _refused(trainer.finish_step, 8.0)}


def test_calls_that_do_not_fit_the_step_are_rejected(tmp_path: Path) -> None:
    """A balancing loss needs the denominator from the beginning."""
    checkpoint = save_checkpoint("qwen3_moe", tmp_path / "model")
    config = _config(checkpoint, tmp_path, algorithm={"moe_aux_loss_coef": 0.01})
    (found,) = run_ranks(_misused, 1, tmp_path / "ranks", config, pack_sequences(scored_sequences(LENGTHS)))
    assert "no reference is loaded" in found["reference"]
    assert found["scale"].startswith("rank 0, begin_step: algorithm.moe_aux_loss_coef=0.01 has a separate denominator")
    assert found["window"].startswith("rank 0, accumulate: a window follows the step's last one")
    wrong = "rank 0, finish_step: denominator=8.0 differs from the 7.0 given to begin_step"
    assert found["other scale"].startswith(wrong)


def _setup_error(placement: RankPlacement, config: RunConfig) -> str:
    return _refused(MegatronTrainer(config, placement).setup)


def test_a_world_of_another_size_is_rejected(qwen3: Path, tmp_path: Path) -> None:
    config = _config(qwen3, tmp_path, {"tensor": 2})
    (message,) = run_ranks(_setup_error, 1, tmp_path / "ranks", config)
    assert "the world has 1 rank," in message


# ------------------------------------------------------------------------------------------------------------ reference
def _scores_of_three(
    placement: RankPlacement, config: RunConfig, pack: PackedTrajectory, path: Path
) -> dict[str, Any] | None:
    """Return each role's scores on the last stage; the policy's weights must stay as they are."""
    teacher = replace(config.roles["reference"], name="teacher", path=path, fields=("scores",))
    roles = Roles({**config.roles, "teacher": teacher})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunConfig, "roles", property(lambda self: roles))
        with running(placement, config) as trainer:
            before = weights_of(trainer)
            found = {name: trainer.score([pack], name) for name in ("reference", "policy", "teacher")}
            assert _same(before, weights_of(trainer))
    return None if found["policy"] is None else {name: scores[0] for name, scores in found.items()}


def test_each_role_scores_with_its_weights_and_leaves_the_policy(qwen3: Path, tmp_path: Path) -> None:
    """A third model needs only a role. Scores have the names of its fields."""
    others = {seed: save_checkpoint("qwen3", tmp_path / f"model{seed}", seed=seed) for seed in (1, 2)}
    sections: dict[str, Any] = {"reference": {"path": others[1]}, "algorithm": {"kl": {"coef": 0.1}}}
    config, sequences = _config(qwen3, tmp_path, {"pipeline": 2}, **sections), scored_sequences(LENGTHS)
    first, found = run_ranks(_scores_of_three, 2, tmp_path / "ranks", config, pack_sequences(sequences), others[2])
    paths = {"policy": qwen3, "reference": others[1], "teacher": others[2]}
    fields = {"policy": ["old_logprobs", "entropy"], "reference": ["ref_logprobs"], "teacher": ["scores"]}
    assert first is None and {name: [*scores] for name, scores in found.items()} == fields
    for name, scores in found.items():
        judge = Reference(paths[name], config.algorithm)
        expected = torch.cat([judge.score(sequence)[0].detach() for sequence in sequences])
        torch.testing.assert_close(scores[fields[name][0]].double(), expected, rtol=0, atol=1e-5)


# ----------------------------------------------------------------------------------------------------------- supervised
def _loss_of_one_step(
    placement: RankPlacement, config: RunConfig, pack: PackedTrajectory
) -> tuple[float, list[float], list[set[float]]]:
    """Return the first step's loss, all learning rates, and the weight decays of all parameter groups."""
    losses, rates, decays = [], [], []
    with running(placement, config) as trainer:
        for _ in range(config.steps):
            stats = take_step(trainer, [pack], float(pack.loss_mask.sum()))
            assert stats is not None
            losses.append(float(stats.loss))
            rates.append(float(stats.learning_rate))
            decays.append({round(group["weight_decay"], 6) for group in trainer.optimizer.megatron.param_groups})
    return losses[0], rates, decays


def test_supervised_loss_is_the_mean_negative_log_likelihood(qwen3: Path, tmp_path: Path) -> None:
    sequences = scored_sequences(LENGTHS)
    config = _config(qwen3, tmp_path, steps=1, algorithm={"loss": "sft"})
    pack = pack_sequences(sequences)
    pack.token_weights = pack.loss_mask.float()
    pack.old_logprobs = pack.logprobs = pack.ref_logprobs = pack.advantages = None
    ((loss, *_),) = run_ranks(_loss_of_one_step, 1, tmp_path / "ranks", config, pack)
    reference = Reference(qwen3, config.algorithm)
    total = sum(-float(reference.score(s)[0][s.loss_mask].sum()) for s in sequences)
    assert loss == pytest.approx(total / float(pack.loss_mask.sum()), abs=1e-5)


SCHEDULES: list[tuple[dict[str, Any], list[float]]] = [
    ({"decay": "constant"}, [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
    ({"decay": "constant", "warmup_steps": 4}, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]),
    ({"decay": "linear", "warmup_steps": 2, "final_weight_decay": 0.4}, [0.5, 1.0, 0.75, 0.5, 0.25, 0.0]),
    ({"decay": "cosine", "min_lr": 5e-4, "warmup_steps": 2}, [0.5, 1.0, 0.9268, 0.75, 0.5732, 0.5]),
]


def test_learning_rates_follow_the_schedule(qwen3: Path, tmp_path: Path) -> None:
    """Compare the rates of six steps, in units of the peak rate, and the weight decays."""
    pack, tasks = pack_sequences(scored_sequences(LENGTHS)), []
    for settings, _ in SCHEDULES:
        optimizer = {"lr": 1e-3, "weight_decay": 0.1, **settings}
        tasks.append((_config(qwen3, tmp_path, steps=6, trainer={"optimizer": optimizer}), pack))
    found = run_each(_loss_of_one_step, 1, tmp_path / "ranks", tasks)
    for (settings, expected), ((_, rates, decays),) in zip(SCHEDULES, found, strict=True):
        assert [rate / 1e-3 for rate in rates] == pytest.approx(expected, abs=1e-4), settings
        growth = settings.get("final_weight_decay", 0.1) - 0.1
        assert decays == [{0.0, round(0.1 + update / 6 * growth, 6)} for update in range(1, 7)]  # none on norms
