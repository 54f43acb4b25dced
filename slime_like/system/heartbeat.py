"""Signs of life and progress of a worker, in a small mapped file that others read without asking the process.

A process that hangs in a collective, a system call or its event loop cannot be asked. ``tick`` shows that it runs at
all, ``beat`` that its work advances, and ``phase`` names the work. Without ``start``, all of them do nothing.
"""

import mmap
import os
import statistics
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

TICK_EVERY_S = 1.0
_DIRECTORY = "SLIME_LIKE_HEARTBEATS"
"""Variable that tells a worker's children where to write."""
_TICK, _BEAT, _COUNT, _USUAL, _PHASE = range(5)  # places of eight bytes
_LAYOUT = struct.Struct("4d32s")
_REMEMBERED = 31


@dataclass(slots=True)
class _Phase:
    name: bytes = b""
    longest_s: float = 0.0


class Heartbeat:
    """Writer of one process's file. A forked child writes to the same file."""

    def __init__(self, path: Path) -> None:
        with path.open("wb+") as file:
            file.truncate(_LAYOUT.size)
            self._file = mmap.mmap(file.fileno(), _LAYOUT.size)
        self._numbers = memoryview(self._file)[: 8 * _PHASE].cast("d")
        self._active = [_Phase()]  # running phases; the first one is idleness
        self._longest = defaultdict[bytes, deque[float]](lambda: deque(maxlen=_REMEMBERED))

    def tick(self) -> None:
        self._numbers[_TICK] = time.monotonic()

    def beat(self) -> None:
        """Record progress. Threads may call it at the same time: a lost count does not matter."""
        now, numbers, phase = time.monotonic(), self._numbers, self._active[-1]
        phase.longest_s = max(phase.longest_s, now - numbers[_BEAT])
        numbers[_BEAT] = now
        numbers[_COUNT] += 1

    def begin(self, name: str) -> _Phase:
        self.beat()
        self._numbers[_COUNT] = 0
        self._active.append(phase := _Phase(name.encode()[:32]))
        self._show()
        return phase

    def end(self, phase: _Phase) -> None:
        self.beat()
        self._active = [each for each in self._active if each is not phase]
        self._longest[phase.name].append(phase.longest_s)
        self._active[-1].longest_s = max(self._active[-1].longest_s, phase.longest_s)
        self._show()

    def _show(self) -> None:
        name = self._active[-1].name
        self._numbers[_USUAL] = statistics.median(self._longest[name]) if len(self._longest[name]) > 2 else 0.0
        self._file[8 * _PHASE :] = name.ljust(32, b"\0")


@dataclass(frozen=True, slots=True)
class Pulse:
    """Seconds since a process's last tick (0 before the first) and progress, the progress since its phase began, the
    median of the longest waits in finished phases of this name (0 before three), and the phase; empty if idle."""

    silent_s: float
    still_s: float
    count: int
    usual_s: float
    phase: str

    @classmethod
    def read(cls, directory: Path, process_id: int) -> Self | None:
        """Read the file of a process on this host; ``None`` without one."""
        try:
            tick, beat, count, usual_s, name = _LAYOUT.unpack((directory / str(process_id)).read_bytes())
        except (OSError, struct.error):  # no file, or not its size yet
            return None
        now = time.monotonic()
        return cls(now - tick if tick else 0.0, now - beat, int(count), usual_s, name.rstrip(b"\0").decode())


_own: Heartbeat | None = None


def start(directory: Path | None = None) -> None:
    """Write this process's heartbeat into ``directory``; by default, where its parent does, if it does."""
    global _own
    if place := os.environ.get(_DIRECTORY) if directory is None else str(directory):
        os.environ[_DIRECTORY] = place
        Path(place).mkdir(exist_ok=True)
        _own = Heartbeat(Path(place, str(os.getpid())))


def tick() -> None:
    """Record that this process, or its event loop, runs. From the first call on, call it every ``TICK_EVERY_S``."""
    if _own is not None:
        _own.tick()


def tick_in_thread() -> None:
    """Call ``tick`` from a daemon thread."""

    def run() -> None:
        while True:
            tick()
            time.sleep(TICK_EVERY_S)

    threading.Thread(target=run, name="heartbeat", daemon=True).start()


def beat() -> None:
    """Record progress: a micro-batch, a bucket, a tensor of a file, a decode iteration."""
    if _own is not None:
        _own.beat()


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Mark this process as busy with ``name``. Phases may overlap; the one that began last is shown."""
    if (own := _own) is None:
        yield
        return
    begun = own.begin(name)
    try:
        yield
    finally:
        own.end(begun)
