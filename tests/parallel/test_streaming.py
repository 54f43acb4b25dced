"""A step whose windows arrive one after another makes the same update as the whole batch at once.

The batcher forms both from the same rollouts, and the weights after an update are compared under three layouts. The
parity matrix (``test_parity.py``) covers that a layout's update is right.
"""

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
from slime_like.config import RunConfig
from slime_like.interfaces import RankPlacement
from slime_like.orchestration.trainer.batcher import ExperienceBatcher, WindowStream
from slime_like.orchestration.trainer.rank_training import RankTraining
from slime_like.statistics import GRPOStats
from slime_like.trajectory import ScoredTrajectory
from tests.parallel.cases import parity_config
from tests.parallel.ranks import run_each
from tests.parallel.steps import running, weights_of
from tests.parallel.tiny import scored_sequences
from tests.support.rollout_rows import batcher_of

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
