"""Worker processes with limits, shared by rewards, environments and agents. A pool belongs to one event loop."""

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil

from slime_like.config.rollout import AgentConfig, EnvironmentConfig, RewardConfig
from slime_like.errors import SlimeLikeError
from slime_like.sandbox.serving import decode, encode
from slime_like.system.disk import bound_log, open_log
from slime_like.system.network import interfaces
from slime_like.system.processes import descendants

_CLOSE_TIMEOUT_S = 2.0
_STARTS = 3
"""Limit on the starts of a worker that something else kills or stops before it is ready."""
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
        if log is None:
            bound_log(self._log)
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


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """Kind of a pool's workers: the module to run, its first message, and the names in messages.

    Attributes:
        repeats: whether an item may be sent a second time, because an unfinished first attempt has no effect.
    """

    module: str
    setup: Mapping[str, Any]
    section: str
    subject: str
    error: type[SlimeLikeError]
    repeats: bool = True


class WorkerPool:
    """``limits.workers`` processes that each process one item at a time. A hung or dead process is replaced.

    The kernel ends the workers when the event loop's thread ends. ``logs`` is the directory for the workers' output,
    and the prefix of its file names. ``about`` is what a worker reported when it was ready.
    """

    def __init__(
        self,
        kind: WorkerKind,
        limits: RewardConfig | EnvironmentConfig | AgentConfig,
        logs: tuple[Path, str] | None = None,
    ) -> None:
        self.about: Mapping[str, Any] = {}
        self._kind = kind
        self._limits = limits
        self._logs = logs
        self._launched = itertools.count()
        self._workers: list[WorkerProcess] = []
        self._free: asyncio.Queue[WorkerProcess | None] = asyncio.Queue()
        self._starting: set[asyncio.Task[None]] = set()
        self._failure: Exception | None = None

    @property
    def process_ids(self) -> tuple[int, ...]:
        return tuple(worker.pid for worker in self._workers)

    async def launch(self) -> None:
        """Launch every worker. ``ready`` waits for them."""
        for _ in range(self._limits.workers):
            self._launch_worker()

    async def ready(self) -> None:
        """Wait for every worker. Raises the kind's error if its code is unusable, or a start takes too long."""
        while self._starting and self._failure is None:
            await asyncio.wait(self._starting, return_when=asyncio.FIRST_COMPLETED)
        if self._failure is not None:
            raise self._failure

    async def start(self) -> None:
        """Launch every worker and wait for it. Raises like ``ready``."""
        await self.launch()
        await self.ready()

    def start_problems(self, attempt: Callable[[], Awaitable[list[str]]] | None = None) -> list[str]:
        """Start the pool in a new event loop, run ``attempt``, and close the pool. Return the problems found."""

        async def start() -> list[str]:
            try:
                await self.start()
                return [] if attempt is None else await attempt()
            except self._kind.error as error:
                return str(error).splitlines()
            finally:
                await self.close()

        return asyncio.run(start())

    async def ask(self, item: dict[str, Any], timeout_s: Callable[[], float] | None = None) -> dict[str, Any] | None:
        """Wait for a free worker, send it the item, and return its answer.

        If the worker hangs or ends, the answer has ``reason``, ``function``, and ``fault`` if the item is to blame. If
        something else stopped or killed the worker, and the kind repeats items, the item is sent once more.
        ``timeout_s`` returns the time limit once a worker is free; by default, that of ``limits``. At 0, the item gets
        no answer. Raises the kind's error if workers no longer start, or the pool is closed.
        """
        is_repeated = not self._kind.repeats
        while True:
            worker = await self._free_worker()
            bound = self._limits.timeout_s if timeout_s is None else timeout_s()
            try:
                if bound:
                    worker.send(item)
                answer = await worker.receive(bound) if bound else None
            except WorkerEnded as ended:
                self._replace(worker)
                if ended.by_signal and not is_repeated:
                    is_repeated = True
                    continue
                limit = f"its processes exceeded {self._kind.section}.memory_mb={self._limits.memory_mb}"
                detail = {"detail": limit} if ended.reason == "memory" else {}
                about = {name: each for name, each in worker.running.items() if name != "fault" or not ended.by_signal}
                return {"reason": ended.reason, **detail, **about}
            except BaseException:  # the caller was cancelled, and the worker is still busy
                self._replace(worker)
                raise
            self._free.put_nowait(worker)
            return answer

    def fail(self, failure: Exception) -> None:
        """Make every later request raise ``failure``."""
        self._failure = failure
        self._free.put_nowait(None)

    async def close(self) -> None:
        """End every worker by its process id, within a bound."""
        self.fail(self._kind.error("the pool is closed", code="pool-closed", remedy="create a new one"))
        for task in self._starting:
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.disconnect()
        await asyncio.gather(*(asyncio.to_thread(worker.end, _CLOSE_TIMEOUT_S) for worker in workers))

    async def _free_worker(self) -> WorkerProcess:
        while self._failure is None:
            worker = await self._free.get()
            if worker is not None and worker.alive:
                return worker
            if worker is not None:
                self._replace(worker)  # it died idle, so no item is at fault
        self._free.put_nowait(None)  # wakes the next waiting call
        raise self._failure

    def _launch_worker(self) -> None:
        task = asyncio.create_task(self._start_worker())
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _start_worker(self) -> None:
        limits = {"memory_mb": self._limits.memory_mb, "timeout_s": self._limits.timeout_s}
        deadline = time.monotonic() + self._limits.start_timeout_s  # of all starts together
        section = self._kind.section
        for starts in itertools.count(1):
            log = None if self._logs is None else (self._logs[0], f"{self._logs[1]}-{next(self._launched)}")
            worker = WorkerProcess(self._kind.module, log)
            self._workers.append(worker)
            try:
                await worker.open({**self._kind.setup, **limits})
                message = await worker.receive(deadline - time.monotonic())
            except WorkerEnded as ended:
                if ended.by_signal and starts < _STARTS:
                    self._remove(worker)
                    continue
                late = f"was not ready within {section}.start_timeout_s={self._limits.start_timeout_s:g} s"
                is_late = ended.reason == "timeout" and not ended.by_signal
                what = late if is_late else "ended or was stopped while starting"
                problem = f"the {section.rpartition('.')[2]} worker {what}: {worker.last_output()}"
                return self.fail(self._kind.error(problem, code="worker-not-started", who=self._kind.subject))
            except Exception as error:
                return self.fail(error)
            if "problems" in message:
                return self.fail(self._kind.error("\n".join(message["problems"]), code="code-unusable"))
            self.about = message
            return self._free.put_nowait(worker)

    def _replace(self, worker: WorkerProcess) -> None:
        if self._remove(worker):
            self._launch_worker()

    def _remove(self, worker: WorkerProcess) -> bool:
        """End the worker. Return False if the pool was closed, which ends all workers itself."""
        if worker not in self._workers:
            return False
        self._workers.remove(worker)
        worker.disconnect()
        worker.end()
        return True
