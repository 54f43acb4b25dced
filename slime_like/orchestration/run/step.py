"""One training step on the trainers: frozen logprobs, then the optimizer steps."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from slime_like.observability.phases import PhaseClock
from slime_like.observability.records import ReferenceRecord
from slime_like.orchestration.rollout.advantages import normalise_importance, penalise_kl
from slime_like.orchestration.run.run import Run
from slime_like.orchestration.trainer.batcher import PackTokens, TrainingBatch, WindowStream
from slime_like.orchestration.trainer.rank_training import StreamedStep
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
    def of_stream(cls, windows: WindowStream, streamed: StreamedStep, with_reference: bool) -> Self:
        """Build the step from its ``windows``."""
        assert streamed.stats is not None  # stats of the group, not of a single rank
        trajectories = sorted(windows.trajectories, key=lambda trajectory: trajectory.group_id)
        reference = _reference_record(trajectories, streamed.reference_s) if with_reference else None
        return cls(trajectories, [streamed.stats], reference, windows.tokens, streamed.busy_s)


def score(run: Run, trajectories: Sequence[ScoredTrajectory], step: int, clock: PhaseClock) -> ReferenceRecord | None:
    """Freeze old logprobs if they are needed before the first update. Freeze reference logprobs on the trainers if a KL
    term in loss or reward needs them and trajectories have none. Supervised steps need neither."""
    config, training, record = run.config, run.trainers.training, None
    if config.supervised:
        return None
    with clock.phase("score"):
        if config.algorithm.scores_policy:
            training.score_batch("policy")
        if config.reference_in_trainer:
            started = time.perf_counter()
            training.score_batch("reference")
            record = _reference_record(trajectories, time.perf_counter() - started)
        if config.algorithm.kl_reward_coef > 0:
            penalise_kl(config, training, trajectories, step)
        if config.algorithm.importance_normalize:
            normalise_importance(config, training, trajectories)
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
        run.trainers.training.train_minibatch(index, denominator)
        for _ in range(run.config.algorithm.epochs)
        for index, denominator in enumerate(batch.denominators)
    ]
