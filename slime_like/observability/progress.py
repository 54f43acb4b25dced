"""Progress output: a live display on a terminal, plain lines elsewhere."""

import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Literal, TextIO

from slime_like.observability.names import ACCURACY, format_metrics, phase_shares, phases_text
from slime_like.observability.timing import Waiting

if TYPE_CHECKING:
    from slime_like.observability.live import LiveDisplay

Mode = Literal["auto", "live", "plain", "off"]
Figures = list[tuple[str, str]]
"""(label, formatted value)."""
Shares = list[tuple[str, float]]
"""(phase, percent of a step)."""

DRIVER_LOG = "driver.log"
FAILED = "failed: "
"""Prefix of the last line in the log of a failed run."""

PLAIN_INTERVAL_S = 1.0
_SHORT_WAIT_S = 1.0
"""Plain mode writes no line about shorter waits."""
_CONTROL = re.compile(r"(?:\x1b\[[0-?]*[ -/]*[@-~])|[\x00-\x1f\x7f-\x9f]+")


class Progress(AbstractContextManager["Progress"]):
    """Progress of ``total_steps`` steps. A context manager. ``close`` restores the terminal.

    Args:
        mode: "live" draws a display in place. "plain" writes lines without control characters, about one per second at
            most, and always the last one. "off" writes nothing. "auto" means live on a terminal and plain elsewhere.
        stream: output stream; standard error by default.
        now: monotonic time in seconds.
        unit: name of a step.
        log: receives the plain lines in every mode. An error that leaves the context becomes its last line.
    """

    def __init__(
        self,
        mode: Mode,
        total_steps: int,
        stream: TextIO | None = None,
        now: Callable[[], float] = time.monotonic,
        unit: str = "step",
        log: TextIO | None = None,
    ) -> None:
        self._values: dict[str, float] = {}
        self._evaluated: int | None = None
        self._log = PlainDisplay(total_steps, log, now, unit) if log is not None else None
        self._displays: list[PlainDisplay | LiveDisplay] = [self._log] if self._log is not None else []
        stream = stream or sys.stderr
        if mode == "live" or (mode == "auto" and stream.isatty()):
            from slime_like.observability import live

            self._displays.append(live.LiveDisplay(total_steps, stream, now, unit))
        elif mode != "off":
            self._displays.append(PlainDisplay(total_steps, stream, now, unit))

    def update(self, step: int, values: Mapping[str, float]) -> None:
        """Show ``values``, metrics by name, after ``step`` steps. Other metrics keep their last values.

        An accuracy from an earlier step is shown with its step.
        """
        self._values.update(values)
        if ACCURACY in values:
            self._evaluated = step
        evaluated = "" if self._evaluated in (None, step) else f" (step {self._evaluated})"
        for display in self._displays:
            display.show(step, format_metrics(self._values, evaluated), phase_shares(self._values))

    def recall(self, step: int, values: Mapping[str, float]) -> None:
        """Restore ``values`` that an earlier start logged at ``step``. The next update shows them."""
        self._values.update(values)
        self._evaluated = step if ACCURACY in values else self._evaluated

    def note(self, text: str) -> None:
        for display in self._displays:
            display.note(text)

    @contextmanager
    def waiting(
        self, title: str, total: int = 0, noun: str = "", count: Callable[[], int] | None = None
    ) -> Iterator[Waiting]:
        """Show the block's wait: a line that changes in live mode, one line at the end in plain mode.

        Plain mode writes each title once, and only if the wait took a second or more. For the arguments, see
        ``Waiting``.
        """
        waiting, displays = Waiting(title, total, noun, count), list(self._displays)
        for display in displays:
            display.begin(waiting)
        completed = False
        try:
            yield waiting
            completed = True
        finally:
            for display in displays:
                display.end(completed)

    def close(self) -> None:
        """Write lines that were held back, and end the display. May be called twice."""
        displays, self._displays = self._displays, []
        for display in displays:
            display.close()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        self.close()
        if self._log is not None and error is not None:
            self._log.note(FAILED + "; ".join((str(error) or type(error).__name__, *getattr(error, "__notes__", ()))))


class PlainDisplay:
    """Display with one line per update, for files and pipes.

    A second line for the same step, e.g. after an evaluation, has only the changed figures.
    """

    def __init__(self, total_steps: int, stream: TextIO, now: Callable[[], float], unit: str) -> None:
        self._total_steps = total_steps
        self._unit = unit
        self._stream = stream
        self._now = now
        self._written_at: float | None = None
        self._held_back: tuple[int, Figures, Shares] | None = None
        self._written: tuple[int, Figures] | None = None
        self._waiting: tuple[Waiting, float] | None = None
        self._waited: set[str] = set()

    def show(self, step: int, figures: Figures, shares: Shares) -> None:
        recent = self._written_at is not None and self._now() - self._written_at < PLAIN_INTERVAL_S
        if recent and step < self._total_steps:
            self._held_back = (step, figures, shares)
            return
        self._write_line(step, figures, shares)
        self._written_at = self._now()

    def note(self, text: str) -> None:
        self._stream.write(_CONTROL.sub(" ", text).strip() + "\n")
        self._stream.flush()

    def begin(self, waiting: Waiting) -> None:
        self._waiting = (waiting, self._now())

    def end(self, completed: bool) -> None:
        assert self._waiting is not None
        (waiting, began), self._waiting = self._waiting, None
        seconds = self._now() - began
        if completed and seconds >= _SHORT_WAIT_S and waiting.title not in self._waited:
            self._waited.add(waiting.title)
            self.note(waiting.finished(seconds))

    def close(self) -> None:
        if self._held_back is not None:
            self._write_line(*self._held_back)

    def _write_line(self, step: int, figures: Figures, shares: Shares) -> None:
        self._held_back = None
        before = self._written[1] if self._written is not None and self._written[0] == step else None
        self._written = (step, figures)
        fresh = figures if before is None else [figure for figure in figures if figure not in before]
        parts = [f"{self._unit} {step}/{self._total_steps}", *(f"{label} {value}" for label, value in fresh)]
        if before is None and shares:
            parts.append(phases_text(shares))
        if fresh or before is None:
            self.note(" | ".join(parts))
