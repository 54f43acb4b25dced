"""A pool's handle of one worker process: pipes, deadlines, exit."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import psutil

from slime_like.errors import SlimeLikeError
from slime_like.sandbox.serving import decode, encode
from slime_like.system.disk import open_log
from slime_like.system.network import interfaces
from slime_like.system.processes import descendants

_KILL_TIMEOUT_S = 5.0
_DEATH_TIMEOUT_S = 1.0
_LOOK_S = 5.0
"""Time until a stopped worker is found, so its replacement is ready within the same timeout of a start."""


class WorkerEnded(Exception):
    """A worker ended ("crash", or "cpu" at its CPU limit), exceeded its memory, or did not answer in time ("timeout").

    ``by_signal``: SIGKILL ended it, or SIGSTOP stopped it. This package sends neither to busy workers.
    """

    def __init__(self, reason: Literal["timeout", "cpu", "crash", "memory"], by_signal: bool = False) -> None:
        self.reason = reason
        self.by_signal = by_signal
        super().__init__(reason)


class WorkerProcess:
    """A running process. Its pipes belong to the running event loop.

    Args:
        module: module to run with ``python -m``, with this process's id as its argument; it calls ``serving.serve``.
        log: directory and role of a log (``open_log``) for its output; by default, the output is discarded.

    Attributes:
        running: ``function`` that it began last, and ``fault`` as in ``serving.untrusted``.
    """

    def __init__(self, module: str, log: tuple[Path, str] | None = None) -> None:
        self.running: dict[str, str] = {}
        # Calls to this host bypass any proxy, and Ray's token is left out.
        given = os.environ.get("no_proxy") or os.environ.get("NO_PROXY")
        direct = ",".join(filter(None, (given, "localhost,127.0.0.1,::1", *interfaces())))
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
        self._keeps_log = log is not None
        self._log = tempfile.TemporaryFile(buffering=0) if log is None else open_log(*log)  # noqa: SIM115 (closed in `end`)
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            bufsize=0,
            start_new_session=True,  # a separate process group, so its children end with it
            env={**kept, "no_proxy": direct, "NO_PROXY": direct},
        )
        self._replies = asyncio.StreamReader(limit=sys.maxsize)  # messages can have any length
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
        """Send a message. A broken pipe is noticed in ``receive``, where the worker's output ends."""
        assert self._writer is not None
        self._writer.write(encode(message))

    async def receive(self, timeout_s: float) -> dict[str, Any]:
        """Return the next answer. Raises ``WorkerEnded`` if the worker is stopped or has ended, or after a timeout."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                async with asyncio.timeout(min(deadline - time.monotonic(), _LOOK_S)):
                    message = decode(await self._replies.readline())
            except TimeoutError:
                stopped = False
                with suppress(psutil.NoSuchProcess):
                    stopped = psutil.Process(self.pid).status() == psutil.STATUS_STOPPED
                if stopped or deadline <= time.monotonic():
                    raise WorkerEnded("timeout", by_signal=stopped) from None
                continue
            if message is None or "running" not in message:
                break
            self.running = message["running"]
        if message is None:
            with suppress(subprocess.TimeoutExpired):  # it closed its output but is still alive
                self._process.wait(_DEATH_TIMEOUT_S)
            code = self._process.returncode
            raise WorkerEnded("cpu" if code == -signal.SIGXCPU else "crash", by_signal=code == -signal.SIGKILL)
        if message.get("ended") == "memory":
            raise WorkerEnded("memory")
        return message

    def last_output(self) -> str:
        """Return the last line of its output, or a likely reason for its end."""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        if self._process.poll() == -signal.SIGKILL:
            return "it was killed; is the machine short of memory?"
        return lines[-1][-500:] if lines else "it wrote nothing"

    def disconnect(self) -> None:
        """Close the pipes, in the loop's thread. An idle worker then exits."""
        if self._reader is not None:
            self._reader.close()
        if self._writer is not None and not self._writer.is_closing():
            self._writer.abort()

    def end(self, grace_s: float = 0.0) -> None:
        """Wait up to ``grace_s`` for its exit after ``disconnect``, then kill it and its children.

        Raises ``SlimeLikeError`` if the kernel cannot end it.
        """
        # A transport closes its pipe a moment after `disconnect`. If this closed it earlier, a new pipe could get the
        # same descriptor while the loop still watches it.
        for pipe, transport in ((self._process.stdin, self._writer), (self._process.stdout, self._reader)):
            if pipe is not None and transport is None:
                pipe.close()
        with suppress(subprocess.TimeoutExpired):
            if grace_s > 0:
                self._process.wait(grace_s)
        others = descendants(self.pid) if self._process.poll() is None else []  # some may have left its group
        for kill, pid in ((os.killpg, self.pid), *((os.kill, pid) for pid in others)):
            with suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)
        try:
            self._process.wait(_KILL_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            problem = f"worker {self.pid} did not end within {_KILL_TIMEOUT_S:.0f} s of SIGKILL"
            raise SlimeLikeError(problem, code="worker-not-ended", remedy="end it by hand") from error
        finally:
            if self._keeps_log and not os.fstat(self._log.fileno()).st_size:
                with suppress(OSError):  # its directory has been moved
                    Path(str(self._log.name)).unlink()
            self._log.close()
