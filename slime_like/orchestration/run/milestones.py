"""Milestones: evaluation, checkpoints and the export, run when they are due."""

from pathlib import Path

from slime_like.checks.earlier_run import BACKEND
from slime_like.interfaces import TrainerBackend
from slime_like.observability.metrics import METRICS_FILE
from slime_like.orchestration.run.directory import EXPORT
from slime_like.orchestration.run.recorder import StepRecorder
from slime_like.orchestration.run.run import Run
from slime_like.orchestration.run.schedule import Schedule
from slime_like.orchestration.run.summary import TrainSummary, summarise


class Milestones:
    """Runs what ``Schedule`` names, between steps and at the end."""

    def __init__(self, run: Run, recorder: StepRecorder) -> None:
        self._run = run
        self._recorder = recorder
        self._schedule = Schedule(run.config)

    def before_first(self) -> None:
        """Evaluate the initial weights; a resumed run has done so."""
        if self._run.finished_steps == 0:
            self._evaluate(step=0)

    def after(self, step: int) -> bool:
        """Run what is due after this step; True if anything was."""
        committed = self._run.checkpoints.commit_written()
        self._report_saved(committed)
        evaluates, saves = self._schedule.evaluates(step), self._schedule.saves(step)
        if evaluates:
            self._evaluate(step)
        if saves:
            self._save(step)
        return evaluates or saves or committed is not None

    def finish(self, wall_s: float) -> TrainSummary:
        """Export the model, draw the curves and summarise after the last step."""
        run, config = self._run, self._run.config
        self._report_saved(run.checkpoints.finish())
        self._recorder.responses.finish()
        files = {"metrics": config.run_dir / METRICS_FILE, "checkpoint": config.run_dir / "checkpoints" / "latest"}
        if config.logging.tensorboard:
            files["tensorboard"] = config.run_dir / "tensorboard"
        if config.checkpoint.export_hf:
            files["hugging face model"] = config.run_dir / EXPORT
            run.devices.training()
            phase = "writing the Hugging Face model"
            run.trainers.ranks.call(phase, TrainerBackend.export_hf, files["hugging face model"])
        files |= self._recorder.responses.draw(files["metrics"], config.run_dir)
        return summarise(config, files, self._recorder.tokens_per_second, wall_s)

    def _evaluate(self, step: int) -> None:
        if metrics := self._run.rollout.evaluate(step):
            self._run.metrics.log(step, metrics)
            self._run.progress.update(step, metrics)

    def _save(self, step: int) -> None:
        run, config = self._run, self._run.config
        run.devices.training()
        state = run.rollout.state_dict() | run.reference.state_dict() | {BACKEND: config.trainer.backend}
        if not config.checkpoint.async_save:
            self._report_saved(run.checkpoints.save(step, state))
            return
        self._report_saved(run.checkpoints.finish())
        run.checkpoints.start(step, state)

    def _report_saved(self, checkpoint: Path | None) -> None:
        if checkpoint is not None:
            step = int(checkpoint.name.partition("-")[2])
            self._run.progress.note(f"checkpoint of step {step}: {checkpoint}")
