"""The pool's side of one worker process: its pipes, its deadline, its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any, Literal

from slime_like.errors import SlimeLikeError
from slime_like.sandbox.protocol import encode, take_messages

_READ_BYTES = 1 << 16
_KILL_TIMEOUT_S = 5.0
_DEATH_TIMEOUT_S = 1.0

STARTS = 3
"""How often in succession a worker is started that somebody else kills before it is ready."""


class WorkerProcess:
    """A started worker. Reading and writing never block; the pool waits for many workers at once.

    Args:
        module: what it runs as ``python -m``, with this process's id as its argument; it calls ``serving.serve``.
        setup: its first message.
        start_timeout_s: until ``deadline`` at first.

    Attributes:
        ready: it has imported what it needs and waits for items.
        pending: items sent and not answered yet, by index; the first is the one in progress.
        deadline: monotonic time by which its next message must have come; ``inf`` while it has nothing to do.
    """

    def __init__(self, module: str, setup: dict[str, Any], start_timeout_s: float) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in `end`)
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            bufsize=0,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        for pipe in (self._stdin, self._stdout):
            os.set_blocking(pipe.fileno(), False)
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self.ready = False
        self.pending: list[int] = []
        self.deadline = time.monotonic() + start_timeout_s
        self.queue(setup)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def read_fd(self) -> int:
        return self._stdout.fileno()

    @property
    def write_fd(self) -> int:
        return self._stdin.fileno()

    @property
    def has_output(self) -> bool:
        """Bytes wait to be written to it."""
        return bool(self._outgoing)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def queue(self, message: dict[str, Any]) -> None:
        self._outgoing += encode(message)

    def write(self) -> None:
        """Write what the pipe takes. A broken pipe shows as the end of its output."""
        try:
            del self._outgoing[: os.write(self.write_fd, self._outgoing[:_READ_BYTES])]
        except BlockingIOError:
            return
        except BrokenPipeError:
            self._outgoing.clear()

    def read(self) -> list[dict[str, Any]] | None:
        """Complete messages that have arrived, ``None`` when it has ended."""
        try:
            data = os.read(self.read_fd, _READ_BYTES)
        except BlockingIOError:
            return []
        if not data:
            return None
        self._incoming += data
        return take_messages(self._incoming)

    def why_it_ended(self) -> Literal["cpu", "crash"]:
        """After ``read`` has returned ``None``: whether the kernel ended it for the CPU time it took."""
        try:
            return "cpu" if self._process.wait(_DEATH_TIMEOUT_S) == -signal.SIGXCPU else "crash"
        except subprocess.TimeoutExpired:  # it has closed its output and lives
            return "crash"

    def was_killed(self) -> bool:
        """After ``read`` has returned ``None``: whether it was ended by SIGKILL, which no code of ours sends."""
        try:
            return self._process.wait(_DEATH_TIMEOUT_S) == -signal.SIGKILL
        except subprocess.TimeoutExpired:
            return False

    def last_words(self) -> str:
        """The end of what it wrote to standard error."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        if self._process.poll() == -signal.SIGKILL:
            return "it was killed; is the machine short of memory?"
        return lines[-1][-500:] if lines else "it wrote nothing"

    def end(self, grace_s: float = 0.0) -> None:
        """Close its input, give it ``grace_s`` to leave, then kill it by its process id.

        Raises:
            SlimeLikeError: it is still there; the kernel cannot end it.
        """
        self._stdin.close()
        try:
            if grace_s > 0:
                self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            pass
        if self._process.poll() is None:
            self._process.kill()
        try:
            self._process.wait(_KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise SlimeLikeError(
                f"worker {self.pid} did not end within {_KILL_TIMEOUT_S:.0f} s of SIGKILL; end it by hand"
            ) from error
        finally:
            self._stdout.close()
            self._log.close()
