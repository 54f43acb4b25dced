"""Spans of this process: what it did when. The driver collects those of all processes in the run's timeline."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MOST = 100_000
"""Spans that are kept until they are taken. Older ones are dropped."""
_spans: deque[tuple[str, str, int, int, dict[str, Any]]] = deque(maxlen=_MOST)
_added = 0


@dataclass(frozen=True, slots=True)
class Spans:
    """Spans of one process.

    Attributes:
        spans: (track, name, begin, end, details) each, in nanoseconds of ``time.perf_counter_ns``.
        dropped: number of further spans, which were too many.
        now_ns: when they were taken.
        clock: identity of the clock. All processes on one kernel have the same.
    """

    spans: list[tuple[str, str, int, int, dict[str, Any]]]
    dropped: int
    now_ns: int
    clock: str


def add_span(track: str, name: str, begin_ns: int, end_ns: int, **details: Any) -> None:
    """Record a span. A track with a slash names its process, too. Callable from any thread."""
    global _added
    _added += 1
    _spans.append((track, name, begin_ns, end_ns, details))


@contextmanager
def span(track: str, name: str, **details: Any) -> Iterator[None]:
    """Record the block as a span, even if it raises."""
    begin_ns = time.perf_counter_ns()
    try:
        yield
    finally:
        add_span(track, name, begin_ns, time.perf_counter_ns(), **details)


def take_spans() -> Spans:
    """Return the spans since the last call."""
    global _added
    found, added, _added = [_spans.popleft() for _ in range(len(_spans))], _added, 0
    clock = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return Spans(found, max(0, added - len(found)), time.perf_counter_ns(), clock)
