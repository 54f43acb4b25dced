"""One training step on the trainers: frozen logprobs, then the optimizer steps."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Self

from slime_like.observability.phases import PhaseClock
from slime_like.observability.records import ReferenceRecord
from slime_like.orchestration.rollout.advantages import normalise_importance, penalise_kl
from slime_like.orchestration.run.run import Run
from slime_like.orchestration.trainer.batcher import PackTokens, TrainingBatch, WindowStream
from slime_like.orchestration.trainer.calls import given
from slime_like.orchestration.trainer.rank_training import RankTraining, StreamedStep
from slime_like.trajectory import GRPOStats, ScoredTrajectory


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """One completed training step.

    Attributes:
        trajectories: its trajectories, in the order of group ids.
        updates: figures of every optimizer step, in order.
        reference: record of scoring with a reference in the trainers, if any.
        tokens: number of computed and shared tokens.
        busy_s: seconds that trainer ranks worked on it; ``None`` if the phase "train" measures that.
    """

    trajectories: Sequence[ScoredTrajectory]
    updates: Sequence[GRPOStats]
    reference: ReferenceRecord | None
    tokens: PackTokens
    busy_s: float | None = None

    @classmethod
    def of_stream(cls, windows: WindowStream, steps: Sequence[StreamedStep], with_reference: bool) -> Self:
        """Build the step from its ``windows`` and what every rank reports. Seconds are means over ranks."""
        trajectories = sorted(windows.trajectories, key=lambda trajectory: trajectory.group_id)
        reference_s, busy_s = (fmean(times) for times in zip(*((s.reference_s, s.busy_s) for s in steps), strict=True))
        reference = _reference_record(trajectories, reference_s) if with_reference else None
        return cls(trajectories, given(s.stats for s in steps)[:1], reference, windows.tokens, busy_s)


def score(run: Run, trajectories: Sequence[ScoredTrajectory], step: int, clock: PhaseClock) -> ReferenceRecord | None:
    """Freeze old logprobs if they are needed before the first update. Freeze reference logprobs on the trainers if a KL
    term in loss or reward needs them and trajectories have none. Supervised steps need neither."""
    config, ranks, record = run.config, run.trainers.ranks, None
    if config.supervised:
        return None
    with clock.phase("score"):
        if config.algorithm.scores_policy:
            ranks.call("scoring with the policy weights", RankTraining.score_batch, "policy")
        if config.reference_in_trainer:
            started = time.perf_counter()
            ranks.call("scoring with the reference weights", RankTraining.score_batch, "reference")
            record = _reference_record(trajectories, time.perf_counter() - started)
        if config.algorithm.kl_reward_coef > 0:
            penalise_kl(config, ranks, trajectories, step)
        if config.algorithm.importance_normalize:
            normalise_importance(config, ranks, trajectories)
    return record


def _reference_record(trajectories: Sequence[ScoredTrajectory], seconds: float) -> ReferenceRecord:
    return ReferenceRecord(
        total_s=seconds,
        model_running_s=seconds,
        waiting_s=0.0,  # the reference scores inside the trainer, on packs that are already there
        response_tokens=sum(trajectory.response_len for trajectory in trajectories),
        total_tokens=sum(trajectory.total_len for trajectory in trajectories),
    )


def update(run: Run, batch: TrainingBatch) -> list[GRPOStats]:
    """Run the optimizer steps of one training step: ``algorithm.epochs`` passes over the minibatches."""
    return [
        given(run.trainers.ranks.call("training", RankTraining.train_minibatch, index, denominator))[0]
        for _ in range(run.config.algorithm.epochs)
        for index, denominator in enumerate(batch.denominators)
    ]
