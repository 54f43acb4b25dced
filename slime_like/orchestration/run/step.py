"""One training step on the trainers: frozen logprobs, then the optimizer steps."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Self

from slime_like.observability.phases import PhaseClock
from slime_like.observability.records import ScoringRecord
from slime_like.orchestration.rollout.advantages import Advantages, normalise_importance
from slime_like.orchestration.run.run import Run
from slime_like.orchestration.trainer.batcher import PackTokens, TrainingBatch, WindowStream
from slime_like.orchestration.trainer.calls import given
from slime_like.orchestration.trainer.rank_training import RankTraining, StreamedStep
from slime_like.statistics import GRPOStats
from slime_like.trajectory import ScoredTrajectory


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """One completed training step.

    Attributes:
        trajectories: its trajectories, in the order of group ids.
        updates: figures of every optimizer step, in order.
        scoring: work of the frozen roles that trainer ranks hold.
        tokens: number of computed and shared tokens.
        busy_s: seconds that trainer ranks worked on it; ``None`` if the phase "train" measures that.
    """

    trajectories: Sequence[ScoredTrajectory]
    updates: Sequence[GRPOStats]
    scoring: Mapping[str, ScoringRecord]
    tokens: PackTokens
    busy_s: float | None = None

    @classmethod
    def of_stream(cls, windows: WindowStream, steps: Sequence[StreamedStep]) -> Self:
        """Build the step from its ``windows`` and what every rank reports. Seconds are means over ranks."""
        trajectories = sorted(windows.trajectories, key=lambda trajectory: trajectory.group_id)
        scoring = {
            role: _scoring_record(trajectories, fmean(step.scoring_s[role] for step in steps))
            for role in steps[0].scoring_s
        }
        busy_s = fmean(step.busy_s for step in steps)
        return cls(trajectories, given(s.stats for s in steps)[:1], scoring, windows.tokens, busy_s)


def score(run: Run, trajectories: Sequence[ScoredTrajectory], step: int, clock: PhaseClock) -> dict[str, ScoringRecord]:
    """Freeze the scores of every role that the first update or the KL in the reward needs and trajectories lack."""
    config, ranks, records = run.config, run.trainers.ranks, dict[str, ScoringRecord]()
    if config.supervised:
        return records
    with clock.phase("score"):
        for role in config.roles.scoring:
            started = time.perf_counter()
            ranks.call(f"scoring with the {role.name} weights", RankTraining.score_batch, role.name)
            if not role.trained:
                records[role.name] = _scoring_record(trajectories, time.perf_counter() - started)
        if config.algorithm.kl_reward_coef > 0:
            Advantages(config).penalise_kl(ranks, trajectories, step)
        if config.algorithm.importance_normalize:
            normalise_importance(config.algorithm, ranks, trajectories)
    return records


def _scoring_record(rows: Sequence[ScoredTrajectory], seconds: float) -> ScoringRecord:
    """Return the work of trainers, which score packs that are already there."""
    return ScoringRecord(seconds, seconds, sum(row.response_len for row in rows), sum(row.total_len for row in rows))


def update(run: Run, batch: TrainingBatch) -> list[GRPOStats]:
    """Run the optimizer steps of one training step: ``algorithm.epochs`` passes over the minibatches."""
    return [
        given(run.trainers.ranks.call("training", RankTraining.train_minibatch, index, denominator))[0]
        for _ in range(run.config.algorithm.epochs)
        for index, denominator in enumerate(batch.denominators)
    ]
