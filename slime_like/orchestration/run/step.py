"""The loop's bookkeeping: optimizer steps over one batch, figures, evaluation, checkpoints, the closing summary."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from slime_like.checks.checkpoint_backend import BACKEND
from slime_like.data.dump import dump_path, save_trajectories
from slime_like.observability.curve import plot_reward_curve
from slime_like.observability.flat_reward import FlatSteps
from slime_like.observability.metrics import read_metrics, series
from slime_like.observability.names import ACCURACY, evaluation_metrics, step_metrics
from slime_like.observability.phases import PhaseTimes
from slime_like.observability.records import ReferenceRecord, RewardRecord, RolloutRecord, StepRecord
from slime_like.observability.tables import SAMPLE_TABLE
from slime_like.orchestration.rollout.advantages import penalise_kl
from slime_like.orchestration.run.debug_tables import debug_tables
from slime_like.orchestration.run.directory import EXPORT, write_summary
from slime_like.orchestration.run.session import Session
from slime_like.orchestration.trainer.batcher import TrainingBatch
from slime_like.orchestration.trainer.rank import StreamedStep
from slime_like.orchestration.trainer.window_stream import WindowStream
from slime_like.orchestration.weight_sync import SyncReport
from slime_like.trajectory import GRPOStats, ScoredTrajectory

# Asking every rank for its memory costs a round trip; peaks do not change every step.
_MEMORY_EVERY = 10


@dataclass(frozen=True, slots=True)
class TrainSummary:
    """What a finished run has to say.

    Attributes:
        accuracy_before, accuracy_after: held-out accuracy before the first and after the last step; ``None`` without
            evaluation.
        tokens_per_second: response tokens trained on per second of training steps.
        wall_s: the whole run, start-up included.
        files: what was written, by name.
    """

    accuracy_before: float | None
    accuracy_after: float | None
    tokens_per_second: float
    wall_s: float
    files: dict[str, Path]


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """One training step, all of its updates made.

    Attributes:
        trajectories: what it was trained on, in the order of group ids.
        updates: figures of every optimizer step, in order.
        reference: the scoring with the reference, if there was any.
        packed_tokens: tokens computed, padding and fillers included.
        busy_s: seconds that trainer ranks worked on it; ``None`` where that is the phase "train".
    """

    trajectories: Sequence[ScoredTrajectory]
    updates: Sequence[GRPOStats]
    reference: ReferenceRecord | None
    packed_tokens: int
    busy_s: float | None = None

    @classmethod
    def of_stream(cls, windows: WindowStream, streamed: StreamedStep, with_reference: bool) -> TrainedStep:
        """The step that ``windows`` were of."""
        assert streamed.stats is not None  # the group's, not a single rank's
        trajectories = sorted(windows.trajectories, key=lambda trajectory: trajectory.group_id)
        reference = _reference_record(trajectories, streamed.reference_s) if with_reference else None
        return cls(trajectories, [streamed.stats], reference, windows.packed_tokens, streamed.busy_s)


def score(session: Session, trajectories: Sequence[ScoredTrajectory], step: int) -> ReferenceRecord | None:
    """Freeze the step's old logprobs on the trainers where something needs them before the first update does, and the
    reference's where a KL term is on, in loss or reward, and trajectories have not come with them."""
    if session.config.algorithm.scores_policy:
        session.trainers.score_batch("policy")
    record = None
    if session.config.reference_in_trainer:
        started = time.perf_counter()
        session.trainers.score_batch("reference")
        record = _reference_record(trajectories, time.perf_counter() - started)
    if session.config.algorithm.kl_reward_coef > 0:
        penalise_kl(session.config, session.trainers, trajectories, step)
    return record


def _reference_record(trajectories: Sequence[ScoredTrajectory], seconds: float) -> ReferenceRecord:
    return ReferenceRecord(
        total_s=seconds,
        model_running_s=seconds,
        waiting_s=0.0,  # the reference scores inside the trainer, on packs that are there already
        response_tokens=sum(trajectory.response_len for trajectory in trajectories),
        total_tokens=sum(trajectory.total_len for trajectory in trajectories),
    )


def update(session: Session, batch: TrainingBatch) -> list[GRPOStats]:
    """All optimizer steps of one training step: ``algorithm.epochs`` passes over the minibatches."""
    return [
        session.trainers.train_minibatch(index, denominator)
        for _ in range(session.config.algorithm.epochs)
        for index, denominator in enumerate(batch.denominators)
    ]


class StepRecorder:
    """Writes down what happens, and decides what is due."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._config = session.config
        self._trained_tokens = 0
        self._trained_s = 0.0
        self._dropped_prompts = 0
        self._memory: dict[str, float] = {}
        tables = self._config.run_dir / "tables" / f"{SAMPLE_TABLE}.jsonl"
        self._flat_steps = FlatSteps(str(tables) if self._config.debug.samples_per_step else None)

    # -------------------------------------------------------------------------------------------------------- figures
    def record(
        self,
        step: int,
        trained: TrainedStep,
        sync: SyncReport | None,
        times: PhaseTimes,
    ) -> None:
        """Log one training step."""
        trajectories = trained.trajectories
        if self._config.debug.save_rollouts:
            save_trajectories(dump_path(self._config.debug.save_rollouts, step), trajectories)
        lengths = [trajectory.sampled_len for trajectory in trajectories]
        self._trained_tokens += sum(lengths)
        self._trained_s += times.step_s
        if step % _MEMORY_EVERY == 1:
            self._memory = {"peak_rss (GiB)": self._session.trainers.peak_memory_bytes() / 2**30}
        metrics = step_metrics(
            StepRecord(
                updates=trained.updates,
                times=times,
                response_lengths=lengths,
                packed_tokens=trained.packed_tokens,
                actual_tokens=sum(trajectory.total_len for trajectory in trajectories),
                trainers_busy_s=trained.busy_s,
                rewards=self._rewards(step, trajectories),
                rollout=self._rollout(trajectories, step, times),
                reference=trained.reference or self._reference(times),
                weight_gather_s=sync.gather_s if sync else None,
                probe_gap=sync.probe_gap if sync else None,
                sync=sync.record() if sync else None,
                replay_buffer_size=self._queues()[1],
                memory=self._memory,
            )
        )
        if sync and step == self._session.finished_steps + 1:
            self._session.progress.note(str(sync))
        self._session.metrics.log(step, metrics)
        self._session.progress.update(step, metrics)
        self._log_tables(step, trajectories, trained.updates[-1])
        if not self._config.supervised:
            self._note(self._flat_steps.add(step, flat=_without_advantage(trajectories)))

    def _note(self, sentence: str | None) -> None:
        if sentence is not None:
            self._session.progress.note(sentence)

    def _log_tables(self, step: int, trajectories: Sequence[ScoredTrajectory], stats: GRPOStats) -> None:
        debug = self._config.debug
        if self._config.supervised or debug.samples_per_step == 0 or (step > 1 and step % debug.tables_every):
            return
        decode = self._session.tokenizer.decode
        for table in debug_tables(step, trajectories, self._session.trainers, stats, decode, debug.samples_per_step):
            self._session.metrics.log_table(step, table.name, table.columns, table.rows)

    def _rewards(self, step: int, trajectories: Sequence[ScoredTrajectory]) -> RewardRecord | None:
        if self._config.supervised:
            return None
        functions = self._config.reward.functions
        failures = [t.reward_metadata["reason"] for t in trajectories if "reason" in t.reward_metadata]
        if failures:
            reasons = ", ".join(f"{failures.count(reason)} by {reason}" for reason in sorted(set(failures)))
            details = [t.reward_metadata["detail"] for t in trajectories if "detail" in t.reward_metadata]
            reasons += f", first: {details[0]}" if details else ""
            self._session.progress.note(
                f"step {step}, reward: scoring failed for {len(failures)} of {len(trajectories)} responses "
                f"({reasons}); they got reward 0"
            )
        return RewardRecord(
            func_names=[function.name for function in functions],
            weights=[function.weight for function in functions],
            rewards=torch.stack([trajectory.rewards for trajectory in trajectories]),
            successes=torch.stack([trajectory.successes for trajectory in trajectories]),
            group_ids=[trajectory.group_id for trajectory in trajectories],
            failures=failures,
        )

    def _rollout(self, trajectories: Sequence[ScoredTrajectory], step: int, times: PhaseTimes) -> RolloutRecord | None:
        if self._config.supervised:
            return None
        prompts = self._session.prompts
        before, self._dropped_prompts = self._dropped_prompts, prompts.dropped_prompts if prompts else 0
        return RolloutRecord(
            finish_reasons=[trajectory.finish_reason for trajectory in trajectories],
            dropped_prompts=self._dropped_prompts - before,
            queue_size=self._queues()[0],
            seconds=times.step_s if self._config.rollout.max_staleness > 0 else None,  # sampled all the time
            staleness=[_staleness(trajectory, step) for trajectory in trajectories],
        )

    def _reference(self, times: PhaseTimes) -> ReferenceRecord | None:
        """What reference workers have done since the last step's record."""
        side = self._session.rollout
        if side is None or side.references is None:
            return None
        work = side.references.take_work()
        for sentence in side.references.news:
            self._session.progress.note(sentence)
        side.references.news.clear()
        return ReferenceRecord(
            total_s=times.step_s,
            model_running_s=work.busy_s,
            waiting_s=max(0.0, times.step_s - work.busy_s),
            response_tokens=work.response_tokens,
            total_tokens=work.total_tokens,
        )

    def _queues(self) -> tuple[int, int]:
        """Groups on their way, and groups that wait for training."""
        side = self._session.rollout
        return side.source.queue_sizes() if side is not None else (0, 0)

    # --------------------------------------------------------------------------------------- evaluation, checkpoints
    def evaluate_and_save(self, step: int) -> bool:
        """Whatever is due after this step; True if anything was."""
        committed = self._session.checkpoints.commit_written()
        self._tell_saved(committed)
        evaluate, save = self._due(step, self._config.evaluation.every), self._due(step, self._config.checkpoint.every)
        if evaluate:
            self.evaluate(step)
        if save:
            self._save(step)
        return evaluate or save or committed is not None

    def _due(self, step: int, every: int) -> bool:
        return step == self._config.steps or (every > 0 and step % every == 0)

    def evaluate(self, step: int) -> None:
        """Held-out accuracy under the current weights; nothing without an evaluation file."""
        rollout = self._session.rollout
        if rollout is None or rollout.evaluator is None:
            return
        self._session.turns.generation()
        result = rollout.evaluator.run(step)
        metrics = evaluation_metrics(result.overall)
        for name, own in result.datasets.items():
            metrics |= evaluation_metrics(own, name)
        self._session.metrics.log(step, metrics)
        self._session.progress.update(step, metrics)

    def _save(self, step: int) -> None:
        session = self._session
        session.turns.training()
        state: dict[str, Any] = {}
        if session.rollout is not None:
            state = session.rollout.source.state_dict()
        elif session.prompts is not None:
            state = {"data": session.prompts.state_dict()}
        state |= session.reference.state_dict() | {BACKEND: self._config.trainer.backend}
        if not self._config.checkpoint.async_save:
            self._tell_saved(session.checkpoints.save(step, state))
            return
        self._tell_saved(session.checkpoints.finish())
        session.checkpoints.start(step, state)

    def _tell_saved(self, checkpoint: Path | None) -> None:
        if checkpoint is not None:
            self._session.progress.note(f"checkpoint of step {int(checkpoint.name.partition('-')[2])}: {checkpoint}")

    # ------------------------------------------------------------------------------------------------------------ end
    def finish(self, wall_s: float) -> TrainSummary:
        """Export, draw, sum up."""
        self._tell_saved(self._session.checkpoints.finish())
        self._note(self._flat_steps.at_end())
        run_dir = self._config.run_dir
        files = {"metrics": run_dir / "metrics.jsonl", "checkpoint": run_dir / "checkpoints" / "latest"}
        if self._config.logging.tensorboard:
            files["tensorboard"] = run_dir / "tensorboard"
        if self._config.checkpoint.export_hf:
            files["hugging face model"] = run_dir / EXPORT
            self._session.turns.training()
            self._session.trainers.export_hf(files["hugging face model"])
        if not self._config.supervised:
            files["reward curve"] = run_dir / "reward_curve.png"
            plot_reward_curve(files["metrics"], files["reward curve"])
        accuracies = series(read_metrics(files["metrics"]), ACCURACY)[1]  # also those of before a resume
        summary = TrainSummary(
            accuracy_before=accuracies[0] if accuracies else None,
            accuracy_after=accuracies[-1] if accuracies else None,
            tokens_per_second=self._trained_tokens / self._trained_s if self._trained_s else 0.0,
            wall_s=wall_s,
            files=files,
        )
        figures = asdict(summary)
        write_summary(self._config, figures | {"files": {name: str(path) for name, path in files.items()}})
        return summary


def _without_advantage(trajectories: Sequence[ScoredTrajectory]) -> bool:
    """True where there was nothing to learn from: rewards were alike in every group."""
    return not any(bool(trajectory.advantages.any()) for trajectory in trajectories)


def _staleness(trajectory: ScoredTrajectory, step: int) -> int:
    """Step n trains version n - 1."""
    versions = trajectory.weight_versions
    return 0 if versions is None else step - 1 - int(versions.min())
