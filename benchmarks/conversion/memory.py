"""Measure a process's anonymous memory."""

import threading
from pathlib import Path


class AnonymousPeak(threading.Thread):
    """Records the peak of anonymous memory, which excludes pages of files that the kernel may drop.

    Attributes:
        first: bytes at the start.
        peak: maximum since the start.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.first = anonymous_bytes()
        self.peak = self.first
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(0.01):
            self.peak = max(self.peak, anonymous_bytes())

    def stop(self) -> None:
        self._ended.set()
        self.join()


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no RssAnon in /proc/self/status")
