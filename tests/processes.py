"""Running the command line as a user does, and counting what it leaves behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_MARK = "SLIME_TEST_MARK"


@dataclass(frozen=True)
class Finished:
    code: int
    stdout: str
    stderr: str
    left_behind: list[str]


class Command:
    """``slime-like ARGUMENTS`` in a process group of its own; every descendant carries a mark in its environment."""

    def __init__(self, arguments: Sequence[str], log_dir: Path, environment: Mapping[str, str] | None = None) -> None:
        self._mark = uuid.uuid4().hex
        log_dir.mkdir(parents=True, exist_ok=True)
        self._out, self._err = log_dir / "stdout.txt", log_dir / "stderr.txt"
        env = {**os.environ, **(environment or {}), _MARK: self._mark}
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "slime_like.cli", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=env,
                start_new_session=True,
            )

    def stderr(self) -> str:
        return self._err.read_text()

    def stdout(self) -> str:
        return self._out.read_text()

    def interrupt(self) -> None:
        """What Ctrl-C on a terminal does: SIGINT to the whole foreground process group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def wait_for(self, text: str, timeout_s: float) -> None:
        """Until standard output or standard error contains ``text``."""
        deadline = time.monotonic() + timeout_s
        while text not in self.stdout() + self.stderr():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"never printed {text!r}:\n{self.stdout()}\n{self.stderr()}")
            time.sleep(0.1)

    def finish(self, timeout_s: float) -> Finished:
        try:
            code = self.process.wait(timeout_s)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        return Finished(code, self.stdout(), self.stderr(), self._left_behind())

    def marked(self) -> list[int]:
        """Process ids of every living descendant."""
        needle = f"{_MARK}={self._mark}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    if (
                        needle in (entry / "environ").read_bytes()
                        and b"State:\tZ" not in (entry / "status").read_bytes()
                    ):
                        found.append(int(entry.name))
                except (FileNotFoundError, PermissionError, ProcessLookupError):
                    continue  # it ended while we looked
        return found

    def _left_behind(self, grace_s: float = 10.0) -> list[str]:
        """Descendants still alive after a short grace (Ray's daemons end a moment after their driver)."""
        deadline = time.monotonic() + grace_s
        while self.marked() and time.monotonic() < deadline:
            time.sleep(0.2)
        left = []
        for pid in self.marked():
            try:
                left.append((Path("/proc") / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:160])
                os.kill(pid, signal.SIGKILL)
            except (FileNotFoundError, ProcessLookupError):
                continue
        return left


def run(arguments: Sequence[str], log_dir: Path, timeout_s: float = 180.0) -> Finished:
    return Command(arguments, log_dir).finish(timeout_s)
