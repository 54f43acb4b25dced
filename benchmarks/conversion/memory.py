"""What a process holds itself."""

import threading
from pathlib import Path


class AnonymousPeak(threading.Thread):
    """The most memory that the process holds itself: pages of files, which the kernel may drop, are not in it.

    Attributes:
        first: bytes when it was made.
        peak: the most since.
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
