"""Worker processes with limits, shared by rewards, environments and agents. A pool belongs to one event loop."""

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_like.config.rollout import AgentConfig, EnvironmentConfig, RewardConfig
from slime_like.errors import SlimeLikeError
from slime_like.sandbox.process import WorkerEnded, WorkerProcess

_CLOSE_TIMEOUT_S = 2.0
_STARTS = 3
"""Limit on the starts of a worker that something else kills or stops before it is ready."""


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
    """``limits.workers`` processes that process batches of items. A hung or dead process is replaced.

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

    async def ask(
        self,
        items: Sequence[dict[str, Any]],
        settle: Callable[[dict[str, Any]], None],
        timeout_s: Callable[[], float] | None = None,
    ) -> None:
        """Wait for a free worker, send it the items, and pass each answer to ``settle``, in order.

        If a worker hangs or ends, the answer to its current item has ``reason``, ``function``, and ``fault`` if the
        item is to blame, and another worker takes the remaining items. If something else stopped or killed the worker,
        and the kind repeats items, the current item is sent once more. ``timeout_s`` returns the time limit of the next
        item; by default, that of ``limits``. At 0, the remaining items get no answer. Raises the kind's error if
        workers no longer start, or the pool is closed.
        """
        waiting, again, bound = deque(items), False, timeout_s or (lambda: self._limits.timeout_s)
        while waiting:
            worker = await self._free_worker()
            if not bound():
                self._free.put_nowait(worker)
                return
            try:
                worker.send({"items": list(waiting)})
                while waiting:
                    answer = await worker.receive(bound())
                    waiting.popleft()
                    again = False
                    settle(answer)
            except WorkerEnded as ended:
                self._replace(worker)
                again = self._kind.repeats and ended.by_signal and not again
                if again:
                    continue
                waiting.popleft()
                limit = f"its processes exceeded {self._kind.section}.memory_mb={self._limits.memory_mb}"
                detail = {"detail": limit} if ended.reason == "memory" else {}
                about = {name: each for name, each in worker.running.items() if name != "fault" or not ended.by_signal}
                settle({"reason": ended.reason, **detail, **about})
            except BaseException:  # the caller was cancelled, and the worker is still busy
                self._replace(worker)
                raise
            else:
                self._free.put_nowait(worker)

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
