"""Windows that arrive one after another, and rollouts cut into rows, train like whole rollouts in one batch.

The batcher forms packs and windows of both. Compared are the weights after an update under three layouts, and the
gradients of rows, whose prompts are their whole prefixes, computed for each row or once for all rows of a micro-batch.
The parity matrix (``test_parity.py``) covers that a layout's update of whole rollouts is right.
"""

import random
import sys
from dataclasses import dataclass
from pathlib import Path
from traceback import walk_stack
from typing import Any

import pytest
from torch import Tensor

from slime_like.algorithms.losses.loss import Loss
from slime_like.algorithms.losses.policy import LossInputs
from slime_like.algorithms.losses.sums import LossOutput
from slime_like.algorithms.packing.pack import real_tokens
from slime_like.config import RunConfig
from slime_like.interfaces import RankPlacement
from slime_like.orchestration.trainer.batcher import ExperienceBatcher, WindowStream
from slime_like.orchestration.trainer.rank_training import RankTraining
from slime_like.statistics import GRPOStats
from slime_like.trajectory import ScoredTrajectory
from tests.parallel.cases import parity_config
from tests.parallel.checks import GRADIENT_BOUND, LOSS_BOUND, check_tensors
from tests.parallel.layouts import layout_of
from tests.parallel.ranks import run_each
from tests.parallel.steps import exported_gradients, optimizer_steps, running, weights_of
from tests.parallel.tiny import save_checkpoint, scored_sequences
from tests.support.acceptance import some_in_acceptance
from tests.support.rollout_rows import batcher_of, cut_into_rows, random_cuts

BUDGET = 48
GROUPS = 24  # of two sequences each: three windows of single micro-batches, or two where a pipeline takes eight
FIGURES = ("loss", "kl_loss", "entropy", "grad_norm", "engine_gap_mean", "importance_weight", "num_tokens")


@dataclass
class Trained:
    """One rank's result of an update."""

    windows: int
    stats: GRPOStats | None
    before: list[Tensor]
    weights: list[Tensor]


OURS = ("slime_like.", "backends.")
"""Beginnings of our modules' names. docs/architecture.md names the same frames on the way to a loss."""


def _rollouts() -> list[ScoredTrajectory]:
    lengths = [(3 + i % 5, 1 + (7 * i) % 13) for i in range(2 * GROUPS)]
    rollouts = scored_sequences(lengths, fully_masked=(5,))
    for trajectory in rollouts:
        trajectory.old_logprobs = trajectory.ref_logprobs = None  # the trainer scores them itself
    return rollouts


def _update(placement: RankPlacement, config: RunConfig, rollouts: list[ScoredTrajectory], streams: bool) -> Trained:
    with running(placement, config) as trainer:
        place, before = trainer.coordinates, weights_of(trainer)
        rank = RankTraining(config)
        rank.backend, rank.place = trainer, place
        batcher = batcher_of(config, place.data_size)
        windows, stats = (_streamed if streams else _at_once)(rank, batcher, rollouts, place.data)
        trainer.settle_weights()
        return Trained(windows, stats, before, weights_of(trainer))


def _at_once(
    rank: RankTraining, batcher: ExperienceBatcher, rollouts: list[ScoredTrajectory], replica: int
) -> tuple[int, GRPOStats | None]:
    batch = batcher.batch(rollouts)
    rank.load_batch(batch.replicas[replica])
    rank.score_batch("reference")
    frames: list[str] = []
    correct = Loss.__call__

    def loss(self: Loss, inputs: LossInputs) -> LossOutput:
        stack = [frame for frame, _ in walk_stack(sys._getframe(1)) if frame.f_globals["__name__"].startswith(OURS)]
        frames[:] = [frame.f_code.co_name for frame in reversed(stack)]
        return correct(self, inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loss, "__call__", loss)
        stats = rank.train_minibatch(0, batch.denominators[0])
    assert frames == (["train_minibatch", "accumulate", "_micro_batch_loss"] if stats is not None else [])
    return 1, stats


def _streamed(
    rank: RankTraining, batcher: ExperienceBatcher, rollouts: list[ScoredTrajectory], replica: int
) -> tuple[int, GRPOStats | None]:
    early, denominator = train_windows(rank, batcher, rollouts, replica)
    streamed = rank.finish_stream(denominator)
    assert 0 < streamed.scoring_s["reference"] < streamed.busy_s
    assert sum(not pack.is_filler for pack in rank.packs) >= early  # the rank keeps them for its tables
    return early + 1, streamed.stats


def train_windows(
    rank: RankTraining, batcher: ExperienceBatcher, rows: list[ScoredTrajectory], replica: int
) -> tuple[int, float]:
    """Train on windows as groups arrive, the last one first. Return the number of early windows and the denominator."""
    stream, early = WindowStream(batcher), 0
    rank.begin_stream()
    for group in sorted({row.group_id for row in rows}, reverse=True):
        if window := stream.add([row for row in rows if row.group_id == group]):
            rank.train_window(window[replica], last=False)
            early += 1
    window, denominator = stream.finish()
    rank.train_window(window[replica], last=True)
    return early, denominator


@pytest.mark.parametrize(
    ("layout", "fewest"), [({}, 3), ({"data": 2, "distributed": True, "overlap": True}, 3), ({"pipeline": 2}, 2)]
)
def test_streamed_updates_equal_those_of_the_whole_batch(
    layout: dict[str, Any], fewest: int, qwen3: Path, tmp_path: Path
) -> None:
    algorithm: dict[str, Any] = {"importance": {"correction": "truncate", "high": 1.02}, "reduction": "groups"}
    config = parity_config(qwen3, tmp_path, layout, **algorithm)
    trainer = config.trainer.model_copy(update={"target_tokens_per_batch": BUDGET})
    config = config.model_copy(update={"trainer": trainer})
    world = config.trainer.parallel.world_size
    tasks = [(config, _rollouts(), streams) for streams in (False, True)]
    for expected, found in zip(*run_each(_update, world, tmp_path / "ranks", tasks), strict=True):
        assert found.windows >= fewest and expected.windows == 1
        for before, ours, theirs in zip(found.before, found.weights, expected.weights, strict=True):
            apart, change = float((ours - theirs).norm()), float((theirs - before).norm())
            assert apart <= 1e-6 * float(theirs.norm()) and apart <= 1e-3 * change
        assert (found.stats is None) == (expected.stats is None)
        if found.stats is not None and expected.stats is not None:
            for name in FIGURES:
                assert float(getattr(found.stats, name)) == pytest.approx(float(getattr(expected.stats, name)), 1e-5)


# ----------------------------------------------------------------------------------------------------- rows of rollouts
SHARED_BUDGET = 28
ROLLOUTS = 20  # in groups of two
OBJECTIVE: dict[str, Any] = {"kl": {"coef": 0.0}, "importance": {"correction": "truncate", "high": 1.1}}
CASES = {
    "tp2-sp": "tokens",
    "pp2": "groups",
    "cp2": "constant",
    "cp2-allgather": "constant",
    "dp2-distributed": "samples",
    "fsdp-dp2": "samples",
    # Without a balancing loss, which counts a token once for each of its rows.
    "experts-dp2-ep2": "tokens",
    "experts-tp2-sp-ep2": "samples",
    "experts-fsdp-dp2": "groups",
}
"""Reductions by layout."""


def _whole() -> list[ScoredTrajectory]:
    """Make rollouts with all inputs of a step; the sixth is masked, so that its rows have no loss."""
    lengths = [(3 + i % 5, 1 + (7 * i) % 19) for i in range(ROLLOUTS)]
    rollouts = scored_sequences(lengths, fully_masked=(5,))
    for rollout in rollouts:
        rollout.ref_logprobs = None
    return rollouts


def _rows() -> list[ScoredTrajectory]:
    """Cut each rollout into one to five rows, shuffled within groups."""
    pick = random.Random(0)
    rows = [row for rollout in _whole() for row in cut_into_rows(rollout, random_cuts(rollout, pick))]
    assert len(rows) > 2 * ROLLOUTS
    return sorted(pick.sample(rows, len(rows)), key=lambda row: row.group_id)


def _gradients(
    placement: RankPlacement, config: RunConfig, rows: list[ScoredTrajectory], streams: bool
) -> tuple[dict[str, Tensor], float | None]:
    """Return (this rank's exported gradients, the loss if this rank has it)."""
    with running(placement, config) as trainer:
        place = trainer.coordinates
        rank, batcher = RankTraining(config), batcher_of(config, place.data_size)
        rank.backend, rank.place = trainer, place
        if streams:
            early, denominator = train_windows(rank, batcher, rows, place.data)
            assert early >= 1
        else:
            batch = batcher.batch(rows)
            rank.load_batch(batch.replicas[place.data])
            (denominator,) = batch.denominators
            trainer.begin_step(denominator, real_tokens(batch.replicas[place.data][0]))
            trainer.accumulate(batch.replicas[place.data][0], last=True)
        gradients = exported_gradients(trainer, denominator)
        (stats,) = optimizer_steps(trainer, 1, denominator, lambda: None)
    return gradients, None if stats is None else float(stats.loss)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Return models by whether they have experts."""
    families = {False: "qwen3", True: "qwen3_moe"}
    return {has: save_checkpoint(name, tmp_path_factory.mktemp(name), layers=2) for has, name in families.items()}


_IN_ACCEPTANCE = ("tp2-sp", "experts-tp2-sp-ep2", "experts-fsdp-dp2", "cp2-allgather", "dp2-distributed")


@pytest.mark.parametrize("name", some_in_acceptance(CASES, _IN_ACCEPTANCE.__contains__))
def test_rows_train_like_whole_rollouts(name: str, models: dict[bool, Path], tmp_path: Path) -> None:
    reduction, layout = CASES[name], layout_of(name.removeprefix("experts-"))
    model = models[name.startswith("experts")]
    objective = {**OBJECTIVE, "reduction": {"name": reduction, **({"length": 19} if reduction == "constant" else {})}}
    config = parity_config(model, tmp_path, layout, **objective)
    config = _with_trainer(config, target_tokens_per_batch=BUDGET)
    shared = _with_trainer(config, share_prefixes="tree", target_tokens_per_batch=SHARED_BUDGET)
    tasks = [(config, _whole(), False), (config, _rows(), False), (config, _rows(), True)]
    if config.trainer.attention == "allgather" or config.trainer.parallel.context == 1:
        tasks += [(shared, _rows(), False), (shared, _rows(), True)]
    whole, *cut = (_together(ranks) for ranks in run_each(_gradients, 2, tmp_path / "ranks", tasks))
    for gradients, loss in cut:
        check_tensors(gradients, {name: tensor.double() for name, tensor in whole[0].items()}, GRADIENT_BOUND)
        assert loss == pytest.approx(whole[1], rel=LOSS_BOUND)


def _with_trainer(config: RunConfig, **changes: Any) -> RunConfig:
    return config.model_copy(update={"trainer": config.trainer.model_copy(update=changes)})


def _together(ranks: tuple[tuple[dict[str, Tensor], float | None], ...]) -> tuple[dict[str, Tensor], float]:
    gradients = {name: tensor for each, _ in ranks for name, tensor in each.items()}
    return gradients, next(loss for _, loss in ranks if loss is not None)
