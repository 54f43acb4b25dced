"""Worker processes with limits, shared by rewards, environments and agents. Belongs to one event loop."""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_like.config.rollout import AgentConfig, EnvironmentConfig, RewardConfig
from slime_like.errors import SlimeLikeError
from slime_like.sandbox.process import WorkerEnded, WorkerProcess

_CLOSE_TIMEOUT_S = 2.0
_STARTS = 3
"""How often a worker is started that something else kills or stops before it is ready."""


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """Kind of a pool's workers: their module, and their names in messages.

    Attributes:
        module: run as ``python -m``; it calls ``serving.serve``.
        setup: first message, besides the limits.
        section: of the configuration, with the limits.
        subject: the setting that names the code they run.
        repeats: an item may be asked a second time, because nothing of the first has an effect.
    """

    module: str
    setup: Mapping[str, Any]
    who: str
    section: str
    subject: str
    error: type[SlimeLikeError]
    repeats: bool = True


class WorkerPool:
    """``limits.workers`` processes; each takes some items at a time. A hung or dead one is replaced.

    The kernel ends the workers together with the loop's thread, which starts them.

    Args:
        logs: a directory, and what begins the names of the files there that keep what each worker prints.

    Attributes:
        about: what a worker reported when it was ready.
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
        """Start every worker; ``ready`` waits for them."""
        for _ in range(self._limits.workers):
            self._launch_worker()

    async def ready(self) -> None:
        """Wait for every worker. Raises the kind's error where its code cannot be used, or a start takes too long."""
        while self._starting and self._failure is None:
            await asyncio.wait(self._starting, return_when=asyncio.FIRST_COMPLETED)
        if self._failure is not None:
            raise self._failure

    async def ask(
        self,
        items: Sequence[dict[str, Any]],
        settle: Callable[[dict[str, Any]], None],
        timeout_s: Callable[[], float] | None = None,
    ) -> None:
        """Wait for a free worker and pass each item's answer to ``settle``, in order.

        ``timeout_s`` is called for the bound of the next item, by default that of the limits; 0 ends the request, and
        the items that are left have no answer.

        The item at which a worker hangs or ends has ``{"reason": ...}`` as its answer; another worker takes those
        behind it, and the item itself once more where a signal of others was the cause and the kind repeats items.
        Raises the kind's error where workers do not start any more, or the pool is closed.
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
                settle({"reason": ended.reason})
            except BaseException:  # the caller was cancelled, and the worker is still at it
                self._replace(worker)
                raise
            else:
                self._free.put_nowait(worker)

    def fail(self, failure: Exception) -> None:
        """Make every later request raise ``failure``."""
        self._failure = failure
        self._free.put_nowait(None)

    async def close(self) -> None:
        """End every worker, by its process id, within a bound."""
        self.fail(self._kind.error("the pool is closed", code="pool-closed", remedy="make a new one"))
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
                self._replace(worker)  # it died idle, which is no item's fault
        self._free.put_nowait(None)  # wakes the next one that waits
        raise self._failure

    def _launch_worker(self) -> None:
        task = asyncio.create_task(self._add_worker())
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _add_worker(self) -> None:
        try:
            self._free.put_nowait(await self._started_worker())
        except Exception as error:
            self.fail(error)

    async def _started_worker(self) -> WorkerProcess:
        limits = {"memory_mb": self._limits.memory_mb, "timeout_s": self._limits.timeout_s}
        starts = 0
        while True:
            starts += 1
            worker = WorkerProcess(self._kind.module, self._log())
            self._workers.append(worker)
            try:
                await worker.open({**self._kind.setup, **limits})
                message = await worker.receive(self._limits.start_timeout_s)
            except WorkerEnded as ended:
                if ended.by_signal and starts < _STARTS:
                    self._remove(worker)
                    continue
                raise self._start_failure(ended, worker) from None
            if "problems" in message:
                raise self._kind.error("\n".join(message["problems"]), code="code-unusable")
            self.about = message
            return worker

    def _log(self) -> tuple[Path, str] | None:
        if self._logs is None:
            return None
        directory, name = self._logs
        return directory, f"{name}-{next(self._launched)}"

    def _start_failure(self, ended: WorkerEnded, worker: WorkerProcess) -> SlimeLikeError:
        late = f"was not ready within {self._kind.section}.start_timeout_s={self._limits.start_timeout_s:g} s"
        what = late if ended.reason == "timeout" else "ended while starting"
        problem = f"{self._kind.who} {what}: {worker.last_output()}"
        return self._kind.error(problem, code="worker-not-started", who=self._kind.subject)

    def _replace(self, worker: WorkerProcess) -> None:
        if self._remove(worker):
            self._launch_worker()

    def _remove(self, worker: WorkerProcess) -> bool:
        """False where the pool has been closed, which ends its workers itself."""
        if worker not in self._workers:
            return False
        self._workers.remove(worker)
        worker.disconnect()
        worker.end()
        return True
