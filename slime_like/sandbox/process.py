"""A pool's handle of one worker process: pipes, deadlines, exit."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import psutil  # type: ignore[import-untyped]

from slime_like.errors import SlimeLikeError
from slime_like.sandbox.protocol import decode, encode
from slime_like.system.disk import open_log
from slime_like.system.processes import descendants

_KILL_TIMEOUT_S = 5.0
_DEATH_TIMEOUT_S = 1.0


class WorkerEnded(Exception):
    """A worker has ended ("crash"; "cpu": it used up its CPU time), or gave no message in time ("timeout").

    Attributes:
        by_signal: SIGKILL ended it, or SIGSTOP stopped it; this package sends neither to busy workers.
    """

    def __init__(self, reason: Literal["timeout", "cpu", "crash"], by_signal: bool = False) -> None:
        self.reason = reason
        self.by_signal = by_signal
        super().__init__(reason)


class WorkerProcess:
    """A started process whose pipes belong to the event loop that runs.

    Args:
        module: run as ``python -m``, with this process's id as its argument; it calls ``serving.serve``.
        log: a directory and a role, as of ``open_log``: what it prints is kept there, and by default forgotten.
    """

    def __init__(self, module: str, log: tuple[Path, str] | None = None) -> None:
        self._keeps_log = log is not None
        self._log = tempfile.TemporaryFile(buffering=0) if log is None else open_log(*log)  # noqa: SIM115 (closed in `end`)
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            bufsize=0,
            start_new_session=True,  # a process group, so that what it starts ends with it
        )
        self._replies = asyncio.StreamReader(limit=sys.maxsize)  # a message has no bound
        self._reader: asyncio.BaseTransport | None = None
        self._writer: asyncio.WriteTransport | None = None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    async def open(self, setup: dict[str, Any]) -> None:
        """Connect the pipes and send the first message."""
        loop = asyncio.get_running_loop()
        self._reader, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(self._replies), self._process.stdout
        )
        self._writer, _ = await loop.connect_write_pipe(asyncio.Protocol, self._process.stdin)
        self.send(setup)

    def send(self, message: dict[str, Any]) -> None:
        """A broken pipe shows as the end of the worker's output."""
        assert self._writer is not None
        self._writer.write(encode(message))

    async def receive(self, timeout_s: float) -> dict[str, Any]:
        """The next message. Raises ``WorkerEnded`` where there is none, or none within ``timeout_s``."""
        try:
            async with asyncio.timeout(timeout_s):
                message = decode(await self._replies.readline())
        except TimeoutError:
            raise WorkerEnded("timeout", by_signal=self._is_stopped()) from None
        if message is None:
            code = self._exit_code()
            raise WorkerEnded("cpu" if code == -signal.SIGXCPU else "crash", by_signal=code == -signal.SIGKILL)
        return message

    def _is_stopped(self) -> bool:
        with suppress(psutil.NoSuchProcess):
            return bool(psutil.Process(self.pid).status() == psutil.STATUS_STOPPED)
        return False

    def last_output(self) -> str:
        """The end of what it wrote to standard error."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        if self._process.poll() == -signal.SIGKILL:
            return "it was killed; is the machine short of memory?"
        return lines[-1][-500:] if lines else "it wrote nothing"

    def disconnect(self) -> None:
        """Close its pipes, in the loop's thread: a worker that is idle then exits."""
        if self._reader is not None:
            self._reader.close()
        if self._writer is not None and not self._writer.is_closing():
            self._writer.abort()

    def end(self, grace_s: float = 0.0) -> None:
        """Wait ``grace_s`` for its exit after ``disconnect``, then kill it and what it has started.

        Raises ``SlimeLikeError`` where the kernel cannot end it.
        """
        self._close_pipes()
        try:
            if grace_s > 0:
                self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            pass
        others = descendants(self.pid) if self._process.poll() is None else []  # some may have left its group
        for kill, pid in ((os.killpg, self.pid), *((os.kill, pid) for pid in others)):
            with suppress(ProcessLookupError):  # nothing of it is left
                kill(pid, signal.SIGKILL)
        try:
            self._process.wait(_KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            problem = f"worker {self.pid} did not end within {_KILL_TIMEOUT_S:.0f} s of SIGKILL"
            raise SlimeLikeError(problem, code="worker-not-ended", remedy="end it by hand") from error
        finally:
            self._close_log()

    def _close_pipes(self) -> None:
        """Those that no transport has, which closes its own a moment after ``disconnect``: a number that is free before
        would be given to another pipe, while the loop still knows it as this one."""
        for pipe, transport in ((self._process.stdin, self._writer), (self._process.stdout, self._reader)):
            if pipe is not None and transport is None:
                pipe.close()

    def _close_log(self) -> None:
        """One that holds nothing goes."""
        if self._keeps_log and not os.fstat(self._log.fileno()).st_size:
            with suppress(OSError):  # moved away with its directory
                Path(str(self._log.name)).unlink()
        self._log.close()

    def _exit_code(self) -> int | None:
        """``None`` where it has closed its output and lives."""
        try:
            return self._process.wait(_DEATH_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return None
