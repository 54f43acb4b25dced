"""StepRecorder: a step's figures to the log and to the screen."""

from collections.abc import Sequence
from pathlib import Path

from slime_like.data.dump import dump_path, save_trajectories
from slime_like.observability.names import step_metrics
from slime_like.observability.phases import PhaseTimes
from slime_like.observability.records import RewardRecord, RolloutRecord, StepRecord
from slime_like.orchestration.run.rollout_side import RolloutFigures
from slime_like.orchestration.run.run import Run
from slime_like.orchestration.run.step import TrainedStep
from slime_like.trajectory import ScoredTrajectory

# Asking every rank for its memory costs a round trip; peaks do not change every step.
_MEMORY_EVERY = 10


class StepRecorder:
    """Records training steps on demonstrations; for sampled responses see ``ResponseRecorder``."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._trained_tokens = 0
        self._trained_s = 0.0
        self._memory: dict[str, float] = {}

    @property
    def tokens_per_second(self) -> float:
        """Response tokens trained on per second of the recorded steps."""
        return self._trained_tokens / self._trained_s if self._trained_s else 0.0

    def record(self, step: int, trained: TrainedStep, times: PhaseTimes) -> None:
        """Log one training step."""
        run = self._run
        if directory := run.config.debug.save_rollouts:
            save_trajectories(dump_path(directory, step), trained.trajectories)
        self._trained_tokens += sum(trajectory.sampled_len for trajectory in trained.trajectories)
        self._trained_s += times.step_s
        if step % _MEMORY_EVERY == 1:
            self._memory = {"peak_rss (GiB)": run.trainers.peak_memory_bytes() / 2**30}
        rewards = self.rewards(step, trained.trajectories)
        figures = run.rollout.figures(times.step_s)
        rollout = self.rollout(step, trained.trajectories, times, figures)
        self.note(*figures.notes)
        metrics = step_metrics(
            StepRecord(
                updates=trained.updates,
                times=times,
                response_lengths=[trajectory.sampled_len for trajectory in trained.trajectories],
                packed_tokens=trained.packed_tokens,
                actual_tokens=sum(trajectory.total_len for trajectory in trained.trajectories),
                trainers_busy_s=trained.busy_s,
                rewards=rewards,
                rollout=rollout,
                reference=trained.reference or figures.reference,
                weight_gather_s=figures.gather_s,
                probe_gap=figures.probe_gap,
                sync=figures.sync,
                replay_buffer_size=figures.ready_groups,
                memory=self._memory,
            )
        )
        if step == run.finished_steps + 1:
            self.note(figures.sync_line)
        run.metrics.log(step, metrics)
        run.progress.update(step, metrics)
        self.finish_step(step, trained)

    def note(self, *sentences: str | None) -> None:
        """Print the sentences that there are."""
        for sentence in filter(None, sentences):
            self._run.progress.note(sentence)

    # -------------------------------------------------------------------- what sampled responses have in addition
    def rewards(self, step: int, trajectories: Sequence[ScoredTrajectory]) -> RewardRecord | None:
        """Return the reward functions' results."""

    def rollout(
        self, step: int, trajectories: Sequence[ScoredTrajectory], times: PhaseTimes, figures: RolloutFigures
    ) -> RolloutRecord | None:
        """Return the figures of sampling."""

    def finish_step(self, step: int, trained: TrainedStep) -> None:
        """Write tables and warnings, after the step's metrics."""

    def finish(self) -> None:
        """Write warnings about the whole run, after the last step."""

    def draw(self, metrics: Path, run_dir: Path) -> dict[str, Path]:
        """Draw the curves of a finished run; their files, by name."""
        return {}
