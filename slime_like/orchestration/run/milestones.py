"""Milestones: evaluation, checkpoints and export, run when they are due."""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from slime_like.checks.run_files import BACKEND, FINGERPRINT
from slime_like.config.roles import CRITIC, POLICY
from slime_like.errors import HEALTH_STOP, CheckpointError, SlimeLikeError
from slime_like.models.weight_files import fingerprint
from slime_like.observability.metrics import METRICS_FILE, read_metrics, series
from slime_like.observability.names import ACCURACY
from slime_like.observability.tables import HELD_OUT_TABLE, held_out_rows
from slime_like.orchestration.run.directory import CRITIC_EXPORT, EXPORT, SUMMARY_FILE, RunDirectory
from slime_like.orchestration.run.recorder import StepRecorder
from slime_like.orchestration.run.sources import Run
from slime_like.orchestration.trainer.checkpoint import REFUSED
from slime_like.orchestration.trainer.rank import TrainerRank
from slime_like.weights.adapter import ADAPTER, adapter_facts

_WRITING = "writing the checkpoint"
_EXPORTS = {POLICY: ("hugging face model", EXPORT), CRITIC: ("critic", CRITIC_EXPORT)}


@dataclass(frozen=True, slots=True)
class TrainSummary:
    """Summary figures of a finished run.

    Attributes:
        accuracy_before, accuracy_after: held-out accuracy before the first and after the last step; ``None`` without
            evaluation. The former is also ``None`` if ``measured_otherwise_until`` is not 0.
        measured_otherwise_until: last step of starts whose accuracy depends on other settings (reward, held-out files).
        tokens_per_second: trained response tokens per second of training steps.
        wall_s: duration of the whole run, including startup.
    """

    accuracy_before: float | None
    accuracy_after: float | None
    measured_otherwise_until: int
    tokens_per_second: float
    wall_s: float
    files: dict[str, Path]


def is_due(step: int, every: int, last: int) -> bool:
    """Return whether ``step``, counted from 1, is the last step or a multiple of ``every``; 0 means only the last."""
    return step == last or (every > 0 and step % every == 0)


class Milestones:
    """Runner for everything that is due between steps and at the end."""

    def __init__(self, run: Run, recorder: StepRecorder) -> None:
        self._run = run
        self._recorder = recorder
        model = run.config.model
        self._failed_saves = 0
        self._facts = {FINGERPRINT: fingerprint(model.path), ADAPTER: adapter_facts(model)}

    def before_first(self) -> None:
        """Evaluate the initial weights. A resumed run shows its last measurement if that is still comparable."""
        run, finished = self._run, self._run.finished_steps
        if finished == 0:
            self._evaluate(step=0)
            return
        first = RunDirectory(run.config).measured_otherwise_until() or -1
        measured = zip(*series(read_metrics(run.config.run_dir / METRICS_FILE), ACCURACY), strict=True)
        for step, accuracy in measured:
            if first < step <= finished:
                run.progress.recall(step, {ACCURACY: accuracy})

    def after(self, step: int) -> None:
        """Run what is due after this step."""
        config = self._run.config
        self._try_save(self._run.checkpoints.commit_written)
        if is_due(step, config.evaluation.every, config.steps):
            self._evaluate(step)
        stop = self._recorder.alarms.stop if step < config.steps else None
        if stop is not None or is_due(step, config.checkpoint.every, config.steps):
            self._save(step)
        if stop is not None:
            self._finish_save()
            problem, remedy = f"step {step}: {stop.text}", f"remove health.stop_on={stop.rule} to continue nevertheless"
            raise SlimeLikeError(problem, code=HEALTH_STOP, who=f"health.{stop.rule}", remedy=remedy)

    def finish(self, wall_s: float) -> TrainSummary:
        """Export the model, then write and return the summary. Call after the last step."""
        run, config = self._run, self._run.config
        self._finish_save(is_last=True)
        self._recorder.finish()
        files = {"metrics": config.run_dir / METRICS_FILE, "checkpoint": config.run_dir / "checkpoints" / "latest"}
        if config.logging.tensorboard:
            files["tensorboard"] = config.run_dir / "tensorboard"
        if config.checkpoint.export_hf:
            run.devices.training()
            phase = "writing the Hugging Face model"
            for name, (title, directory) in _EXPORTS.items():
                if (model := run.models.get(name)) is None:
                    continue
                files[title] = config.run_dir / directory
                with run.progress.waiting(phase), model.on_devices():
                    model.call(phase, TrainerRank.export_hf, files[title])
        until = RunDirectory(config).measured_otherwise_until()
        before, after = accuracy_change(read_metrics(files["metrics"]), comparable=until == 0)
        summary = TrainSummary(before, after, until, self._recorder.tokens_per_second, wall_s, files)
        text = json.dumps({"steps": config.steps, **asdict(summary)}, indent=1, default=str) + "\n"
        (config.run_dir / SUMMARY_FILE).write_text(text, encoding="utf-8")
        return summary

    def _evaluate(self, step: int) -> None:
        run = self._run
        if (result := run.source.evaluate(step, run.progress)) is None:
            return
        parts = {"evaluation": result.overall, **{f"evaluation/{file}": part for file, part in result.datasets.items()}}
        metrics = {f"{prefix}/{name}": value for prefix, part in parts.items() for name, value in part.items()}
        run.metrics.log(step, metrics)
        run.progress.update(step, metrics)
        if result.samples:
            run.metrics.log_table(step, HELD_OUT_TABLE, held_out_rows(step, result.samples, run.decode))

    def _save(self, step: int) -> None:
        run, config = self._run, self._run.config
        run.devices.training(keep_weights=step < config.steps)
        state = run.source.state_dict() | run.reference.state_dict() | run.kl_reward.state_dict()
        state |= {BACKEND: config.trainer.backend} | self._facts
        is_last = step == config.steps
        if not config.checkpoint.async_save:
            with run.progress.waiting(_WRITING):
                self._try_save(partial(run.checkpoints.save, step, state), is_last)
            return
        self._finish_save()
        self._try_save(partial(run.checkpoints.start, step, state), is_last)

    def _finish_save(self, is_last: bool = False) -> None:
        with self._run.progress.waiting(_WRITING):
            self._try_save(self._run.checkpoints.finish, is_last)

    def _try_save(self, save: Callable[[], Path | None], is_last: bool = False) -> None:
        """Run a part of a save, and report the checkpoint that it completes.

        If the disk refuses, the run continues, and the next save tries again. Nothing comes after the last save.

        Raises:
            CheckpointError: the disk refused the last save, or more than ``checkpoint.max_failed_saves`` in a row.
        """
        try:
            checkpoint = save()
        except CheckpointError as error:
            self._failed_saves += 1
            left = self._run.config.checkpoint.max_failed_saves - self._failed_saves
            if error.code not in REFUSED or is_last or left < 0:
                raise
            self._run.progress.note(f"a checkpoint failed ({error}); training continues, and the next save tries again")
            return
        if checkpoint is not None:
            self._failed_saves = 0
            step = int(checkpoint.name.partition("-")[2])
            self._run.progress.note(f"checkpoint of step {step}: {checkpoint}")


def accuracy_change(records: Iterable[Mapping[str, Any]], comparable: bool = True) -> tuple[float | None, float | None]:
    """Return held-out accuracy before the first and after the last step. Records from before a resume count.

    Args:
        comparable: whether all were measured with the same settings. Otherwise the first one is ``None``.
    """
    steps, accuracies = series(records, ACCURACY)
    before = accuracies[0] if comparable and steps[:1] == [0] else None
    return before, accuracies[-1] if accuracies else None
