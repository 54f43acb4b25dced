"""StepRecorder: a step's figures to the log and to the screen."""

from slime_like.data.dump import dump_path, save_trajectories
from slime_like.observability.names import step_metrics
from slime_like.observability.phases import PhaseTimes
from slime_like.observability.records import StepRecord
from slime_like.orchestration.run.responses import response_recorder
from slime_like.orchestration.run.rollout_side import RolloutFigures
from slime_like.orchestration.run.run import Run
from slime_like.orchestration.run.schedule import Schedule
from slime_like.orchestration.run.step import TrainedStep


class StepRecorder:
    """Records training steps."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._schedule = Schedule(run.config)
        self.responses = response_recorder(run)
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
        if self._schedule.measures_memory(step):
            self._memory = {"peak_rss (GiB)": run.trainers.peak_memory_bytes() / 2**30}
        rewards = self.responses.rewards(step, trained.trajectories)
        figures = run.rollout.figures(times.step_s)
        rollout = self.responses.rollout(step, trained.trajectories, times, figures)
        self._note(*figures.notes)
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
        self._show(step, metrics, figures)
        self.responses.finish_step(step, trained)

    def _show(self, step: int, metrics: dict[str, float], figures: RolloutFigures) -> None:
        run = self._run
        if figures.sync_line and step == run.finished_steps + 1:
            self._note(figures.sync_line)
        run.metrics.log(step, metrics)
        run.progress.update(step, metrics)

    def _note(self, *sentences: str) -> None:
        for sentence in sentences:
            self._run.progress.note(sentence)
