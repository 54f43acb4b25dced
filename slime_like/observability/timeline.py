"""The timeline of a run: a file of the spans of all its processes, which ``slime-like report --trace`` draws."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from slime_like.observability.metrics import TIMELINE_FILE, open_for_append, write_lines
from slime_like.system.spans import Spans, add_span, take_spans

EARLIER_FILE = "timeline.earlier.jsonl"
_MOST_BYTES = 128 * 2**20
"""Size at which the file takes the place of the earlier one, whose spans are lost."""


class Timeline:
    """Writer of ``run_dir/timeline.jsonl``: a line about every start and its clocks, and one per process and step.

    A later start continues the file. Clocks of other machines are aligned by the shortest round trip so far.
    """

    def __init__(self, run_dir: Path, finished_steps: int) -> None:
        self._path = run_dir / TIMELINE_FILE
        self._file = open_for_append(self._path)
        self._clocks: dict[tuple[str, str], tuple[int, int]] = {}  # (error, offset) of a process's clock
        own = take_spans()  # an earlier run of this process may have left some
        self._start = {"step": finished_steps, "time_ns": time.time_ns(), "clock_ns": own.now_ns}
        self._own_clock = own.clock
        write_lines(self._file, [self._start])

    def write(self, step: int, take: Callable[[], Mapping[str, Spans]] = dict) -> None:
        """Append the spans of this process, and of others as ``take`` returns them by the process's name."""
        sent_ns = time.perf_counter_ns()
        others, got_ns = take(), time.perf_counter_ns()
        if self._path.stat().st_size > _MOST_BYTES:
            self._path.replace(self._path.with_name(EARLIER_FILE))
            self._file.close()
            self._file = open_for_append(self._path)
            write_lines(self._file, [self._start | {"continues": True}])
        lines = []
        for process, taken in {"": take_spans(), **others}.items():
            key, measured = (process, taken.clock), ((got_ns - sent_ns) // 2, (sent_ns + got_ns) // 2 - taken.now_ns)
            self._clocks[key] = min(self._clocks.get(key, measured), measured)
            error, offset = self._clocks[key] if taken.clock != self._own_clock else (0, 0)
            clock = {"offset_ns": offset, "error_ns": error, "dropped": taken.dropped}
            lines.append({"step": step, "process": process, **clock, "spans": taken.spans})
        write_lines(self._file, lines)
        add_span("driver/steps", "timeline", sent_ns, time.perf_counter_ns())

    def close(self) -> None:
        self._file.close()
