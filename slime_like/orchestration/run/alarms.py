"""Alarms of a run's health rules, on the screen, in a file, and as posts to a webhook."""

import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from slime_like.errors import SlimeLikeError
from slime_like.observability.health import CHECKPOINT_SHARE, EVENTS_FILE, STEPS_KEPT, Alarm, Health
from slime_like.observability.metrics import METRICS_FILE, current_records, open_for_append, read_lines, write_lines
from slime_like.observability.names import ENGINE_PERPLEXITY, STEP_TIME
from slime_like.orchestration.run.sources import Run
from slime_like.orchestration.trainer.checkpoint import latest_checkpoint
from slime_like.plugins.options import load_option
from slime_like.system.disk import bytes_below

FAILED = "failed"
"""Rule of an error that ends the run."""


class RunAlarms:
    """Health of a run, whose alarms go to the screen, a file and a webhook.

    Attributes:
        health: state of the rules.
        stop: alarm of a rule of ``health.stop_on``, which ends the run.
    """

    def __init__(self, run: Run) -> None:
        self._run, config = run, run.config.health
        self.health = Health(config, _history(run) if run.finished_steps else ())
        self._webhook = load_option("webhook")(config.webhook, run.progress.note) if config.webhook else None
        self._step = run.finished_steps
        self._sized: tuple[Path | None, int] = None, 0
        self.stop: Alarm | None = None

    def check(self, step: int, metrics: Mapping[str, float]) -> list[Alarm]:
        """Return what the step's metrics raise or clear, after it was told everywhere.

        Raises ``SlimeLikeError`` if the disk rejects the events.
        """
        self._step = step
        seen = {**metrics, **self._disk()}
        if self._run.config.supervised:  # no engine gave logprobs
            seen.pop(ENGINE_PERPLEXITY, None)
        alarms = self.health.check(step, seen)
        for alarm in alarms:
            self._run.progress.note(f"step {step}, {alarm.severity} of health.{alarm.rule}: {alarm.text}")
            self._tell(alarm)
            if alarm.severity != "cleared" and alarm.rule in self._run.config.health.stop_on:
                self.stop = alarm
        return alarms

    def close(self, error: BaseException | None) -> None:
        """Tell about an error that ends the run, and wait a bounded time until the webhook has been told."""
        if isinstance(error, Exception) and self.stop is None:
            with suppress(SlimeLikeError):  # the disk may be full; the error that ends the run is reported anyway
                self._tell(Alarm(self._step + 1, time.time(), FAILED, "alarm", 0.0, 0.0, str(error)))
        if self._webhook is not None:
            self._webhook.close()

    def _tell(self, alarm: Alarm) -> None:
        if self._webhook is not None:
            self._webhook.post(asdict(alarm))
        with open_for_append(self._run.config.run_dir / EVENTS_FILE) as file:
            write_lines(file, [asdict(alarm)])

    def _disk(self) -> dict[str, float]:
        """Compare the size of a checkpoint with the free space; nothing before the first one."""
        run_dir = self._run.config.run_dir
        if (latest := latest_checkpoint(run_dir)) is None:
            return {}
        latest = latest.resolve()
        if latest != self._sized[0]:
            self._sized = latest, bytes_below(latest)
        return {CHECKPOINT_SHARE: self._sized[1] / max(1, shutil.disk_usage(run_dir).free)}


def _history(run: Run) -> Iterator[Mapping[str, float]]:
    """Yield the metrics of the last steps before the checkpoint that a run resumed from."""
    lines = read_lines(run.config.run_dir / METRICS_FILE, 2 * STEPS_KEPT)  # an evaluation has a line, too
    for record in current_records(line for _, line in lines):
        if STEP_TIME in record and record["step"] <= run.finished_steps:
            yield {name: value for name, value in record.items() if value is not None}
