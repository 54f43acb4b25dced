"""A ``slime-like`` command as a child process: its output is passed on, its closing sentence is kept."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Self

from slime_like.system.interrupts import raise_if_interrupted

_PREFIX = "slime-like: "
_LINES = 60
_LOOK_EVERY_S = 0.1


class Child:
    """``slime-like ARGUMENTS``, which ends with this process. Context manager: outside, it has ended."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], stop_s: float) -> None:
        """
        Args:
            stop_s: how long it may take to end after it has been asked to.
        """
        self.command = f"slime-like {arguments[0]}"
        self._stop_s = stop_s
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "slime_like.commands.child_main", str(os.getpid()), *arguments],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=dict(environment),
            start_new_session=True,  # one Ctrl-C is enough, and it comes from us
        )
        self._pump = threading.Thread(target=self._copy, name="stderr", daemon=True)
        self._pump.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def poll(self) -> int | None:
        """Exit code; ``None`` while it runs."""
        return self._process.poll()

    def wait(self, watch: Callable[[], None]) -> int:
        """Wait for its exit code; ``watch`` is called meanwhile, and its errors end the child."""
        while (code := self.poll()) is None:
            raise_if_interrupted()
            watch()
            time.sleep(_LOOK_EVERY_S)
        self._pump.join(self._stop_s)
        return code

    def stop(self, within_s: float | None = None) -> None:
        """Ask it to end as Ctrl-C does, and make it after ``within_s`` seconds, by default those it was given."""
        if self.poll() is None:
            self._process.send_signal(signal.SIGINT)  # of SIGTERM Ray prints a stack
            try:
                self._process.wait(self._stop_s if within_s is None else within_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()
        self._pump.join(self._stop_s)

    def sentence(self) -> str:
        """Return its final message without the prefix; several problems are one sentence each."""
        lines = list(self._lines)
        starts = [index for index, line in enumerate(lines) if line.startswith(_PREFIX)]
        if not starts:
            return f"it ended with exit code {self._process.returncode}; its output there has the cause"
        first = lines[starts[-1]].removeprefix(_PREFIX)
        listed = [line.removeprefix("  - ") for line in lines[starts[-1] + 1 :] if line.startswith("  - ")]
        return "; ".join(listed) or first

    def _copy(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._lines.append(line.decode(errors="replace").rstrip("\n"))
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()
