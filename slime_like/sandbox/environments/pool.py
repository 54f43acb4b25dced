"""Steps of many conversations in a few worker processes with bounds on time, memory and CPU. Belongs to one loop."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from slime_like.config.rollout import EnvironmentConfig
from slime_like.errors import EnvironmentFailure
from slime_like.interfaces.environment import Step, Task
from slime_like.sandbox.process import STARTS, WorkerProcess

_MODULE = "slime_like.sandbox.environments.worker"
_SUSPICIOUS_STEPS = 8
_CLOSE_TIMEOUT_S = 2.0


class StepFailed(Exception):
    """A step that has no outcome: it costs its own conversation.

    Attributes:
        reason: "timeout", "crash", "memory", "cpu" or "error".
        detail: what the environment raised, where it did.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        self.reason = reason
        self.detail = detail
        super().__init__(f"{reason}: {detail}" if detail else reason)


class EnvironmentPool:
    """``config.workers`` processes that take one step at a time each; a hung or dead one is replaced.

    The kernel ends the workers together with the thread that called ``start``, which is the loop's.
    """

    def __init__(self, config: EnvironmentConfig) -> None:
        self._config = config
        self._free: asyncio.Queue[_Worker] = asyncio.Queue()
        self._workers: set[_Worker] = set()
        self._replacing: set[asyncio.Task[None]] = set()
        self._broken: EnvironmentFailure | None = None
        self._failed_at_first = 0  # far below 0 once a step has gone well

    @property
    def process_ids(self) -> tuple[int, ...]:
        return tuple(sorted(worker.process.pid for worker in self._workers))

    async def start(self) -> None:
        """Wait until every worker is ready.

        Raises:
            EnvironmentFailure: the environment cannot be used, or a worker did not start in time.
        """
        await asyncio.gather(*(self._add_worker() for _ in range(self._config.workers)))

    async def step(self, task: Task, state: Any, response: str, first: bool) -> Step:
        """One step, the first of a conversation with its reset; waits for a free worker.

        Raises:
            StepFailed: of this step alone.
            EnvironmentFailure: none of the first steps of all had an outcome, or workers do not start any more.
        """
        item = {"task": asdict(task), "state": state, "response": response, "first": first}
        worker = await self._free_worker()
        try:
            answer = await asyncio.wait_for(worker.ask(item), self._config.timeout_s)
        except TimeoutError:
            self._replace(worker)
            raise self._failed("timeout") from None
        except _Ended as error:
            self._replace(worker)
            raise self._failed(error.reason) from None
        except BaseException:  # the caller was cancelled, and the worker is still at it
            self._replace(worker)
            raise
        self._free.put_nowait(worker)
        if "reason" in answer:
            raise self._failed(answer["reason"], answer.get("detail", ""))
        self._failed_at_first = -1
        return Step(**answer)

    async def close(self) -> None:
        """End every worker, by its process id, within a bound."""
        for task in self._replacing:
            task.cancel()
        await asyncio.gather(*self._replacing, return_exceptions=True)
        workers, self._workers = self._workers, set()
        self._broken = EnvironmentFailure("the environment's workers have been closed")
        for worker in workers:
            worker.unwatch()
        await asyncio.gather(*(asyncio.to_thread(worker.process.end, _CLOSE_TIMEOUT_S) for worker in workers))

    async def _free_worker(self) -> _Worker:
        while True:
            if self._broken is not None:
                raise self._broken
            try:
                # A replacement that fails frees nobody: so look again.
                worker = await asyncio.wait_for(self._free.get(), 1.0)
            except TimeoutError:
                continue
            if worker.process.alive:
                return worker
            self._replace(worker)  # it died idle, which is no step's fault

    async def _add_worker(self, starts: int = STARTS) -> None:
        name, timeout = self._config.name, self._config.start_timeout_s
        setup = {
            "name": name,
            "options": self._config.options,
            "memory_mb": self._config.memory_mb,
            "timeout_s": self._config.timeout_s,
        }
        worker = _Worker(WorkerProcess(_MODULE, setup, timeout))
        self._workers.add(worker)
        try:
            answer = await asyncio.wait_for(worker.answer(), timeout)
        except TimeoutError as error:
            late = f"was not ready within rollout.environment.start_timeout_s={timeout:g} s"
            raise EnvironmentFailure(f"a worker of environment {name} {late}: {worker.process.last_words()}") from error
        except _Ended as error:
            if starts > 1 and worker.process.was_killed():
                self._workers.discard(worker)
                worker.unwatch()
                worker.process.end()
                await self._add_worker(starts - 1)
                return
            raise EnvironmentFailure(
                f"a worker of environment {name} ended while starting: {worker.process.last_words()}"
            ) from error
        if "error" in answer:
            raise EnvironmentFailure(f"rollout.environment: {answer['error']}")
        self._free.put_nowait(worker)

    def _replace(self, worker: _Worker) -> None:
        self._workers.discard(worker)
        worker.unwatch()
        worker.process.end()
        task = asyncio.ensure_future(self._add_replacement())
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)

    async def _add_replacement(self) -> None:
        try:
            await self._add_worker()
        except EnvironmentFailure as error:
            self._broken = error

    def _failed(self, reason: str, detail: str = "") -> Exception:
        """One bad turn costs one conversation; an environment that fails on everything is a bug."""
        if self._failed_at_first >= 0:
            self._failed_at_first += 1
        if self._failed_at_first == _SUSPICIOUS_STEPS:
            self._broken = EnvironmentFailure(
                f"environment {self._config.name} had no outcome for any of its first {_SUSPICIOUS_STEPS} steps, last "
                f"by {StepFailed(reason, detail)}; correct it, or raise rollout.environment.timeout_s"
            )
            return self._broken
        return StepFailed(reason, detail)


class _Ended(Exception):
    """A worker is gone."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


class _Worker:
    """A worker process whose pipes the event loop watches; one question at a time."""

    def __init__(self, process: WorkerProcess) -> None:
        self.process = process
        self._loop = asyncio.get_running_loop()
        self._answer: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._loop.add_reader(process.read_fd, self._readable)
        self._send()

    async def ask(self, item: dict[str, Any]) -> dict[str, Any]:
        """Raises ``_Ended``."""
        self._answer = self._loop.create_future()
        self.process.queue({"items": [item]})
        self._send()
        return await self.answer()

    async def answer(self) -> dict[str, Any]:
        return await self._answer

    def unwatch(self) -> None:
        """Before its pipes are closed: their numbers will be others'."""
        self._loop.remove_reader(self.process.read_fd)
        self._loop.remove_writer(self.process.write_fd)

    def _send(self) -> None:
        self.process.write()
        if self.process.has_output:
            self._loop.add_writer(self.process.write_fd, self._writable)

    def _writable(self) -> None:
        self.process.write()
        if not self.process.has_output:
            self._loop.remove_writer(self.process.write_fd)

    def _readable(self) -> None:
        messages = self.process.read()
        if messages is None:
            self._loop.remove_reader(self.process.read_fd)
            if not self._answer.done():
                self._answer.set_exception(_Ended(self.process.why_it_ended()))
        for message in messages or ():
            if not self._answer.done():
                self._answer.set_result(message)
