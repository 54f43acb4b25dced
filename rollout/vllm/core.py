"""Life of vLLM's AsyncLLM and the processes of its engine core."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rollout.limits import on_cpu
from rollout.vllm.arguments import prepare_environment
from rollout.weight_update import results
from slime_like.config import RolloutConfig
from slime_like.errors import SlimeLikeError
from slime_like.hosting.faults import EngineFaults, one_line
from slime_like.interfaces.engine import WHOLE, EngineNode
from slime_like.system.heartbeat import beat
from slime_like.system.processes import end_processes, is_alive, mapped_files, process_ids, start_tracker

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.executor import Executor

_SHUTDOWN_S = 3.0
"""Time for the engine core to end by itself. It has nothing to save, so it is killed afterwards."""
_BUILD_END_S = 60.0
"""Time for an abandoned start to finish importing or configuring vLLM, when there is no core to end yet."""
_LOOK_AT_BUILD_S = 0.2
_LOOK_EVERY_S = 1.0
"""Time between checks of the engine core's process during a call."""
_SHARED_FILES = "/dev/shm/vllm_dist_"
"""Prefix of the files through which tensor-parallel CPU ranks exchange data. vLLM never removes them."""

T = TypeVar("T")


class EngineCore:
    """One AsyncLLM and its processes. It can be started again after ``stop``.

    On a further node of an engine that spans nodes, only the executor of the ranks there.
    """

    def __init__(
        self,
        rollout: RolloutConfig,
        arguments: Callable[[], AsyncEngineArgs],
        faults: EngineFaults,
        part: EngineNode = WHOLE,
    ) -> None:
        self.process_ids: tuple[int, ...] = ()
        self._rollout, self._arguments, self._part = rollout, arguments, part
        self._faults = faults
        self._llm: AsyncLLM | None = None
        self._further: Executor | None = None
        self._shared_files: set[Path] = set()
        self._built = threading.Event()
        self._built.set()

    async def start(self) -> None:
        """Load the model and start the engine core's process. If this raises or is canceled, call ``stop``."""
        start_tracker()
        before = process_ids()
        try:
            # In a separate call, because something vLLM imports keeps the importing frames and everything in them.
            await asyncio.to_thread(self._import)
            await asyncio.to_thread(self._build)
            if self._further is None:
                await self.alive().update_weight_version("0")
                # Cached by vLLM, so adding a request later never waits between its check and its registration.
                await self.alive().get_supported_tasks()
                if on_cpu() and self._rollout.pipeline > 1:
                    await self.workers("vllm.worker:make_stage_buffer")
        except BaseException as error:
            await asyncio.to_thread(self._end_build, before)
            if isinstance(error, SlimeLikeError) or not isinstance(error, Exception):
                raise
            raise self._faults.start_failed(one_line(error), self._faults.log) from error
        self._note_processes(before)
        self._remove_files()

    def alive(self) -> AsyncLLM:
        """Return the AsyncLLM. Raises ``EngineError`` if it was not started, or has died."""
        if self._llm is None:
            raise self._faults.not_running()
        if self._llm.errored:
            raise self._faults.died()
        return self._llm

    async def ping(self) -> None:
        """Wait for an answer of the core. Ranks on a further node count as alive until one has ended."""
        if self._further is None:
            await self.alive().get_weight_version()
        elif not all(map(is_alive, self.process_ids)):
            raise self._faults.died()

    async def while_alive(self, call: Awaitable[T]) -> T:
        """Await the call, but raise if the core's process dies, because vLLM then never answers."""
        task = asyncio.ensure_future(call)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=_LOOK_EVERY_S)
                if not task.done():
                    self.alive()
                    if not all(map(is_alive, self.process_ids)):
                        raise self._faults.died()
            return task.result()
        finally:
            task.cancel()

    async def workers(self, method: str, *arguments: Any) -> list[Any]:
        """Call ``WorkerExtension.attempt`` of every worker. Raises ``WeightSyncError`` if one failed."""
        return results(await self.while_alive(self.alive().collective_rpc("attempt", args=(method, *arguments))))

    async def stop(self) -> None:
        """End the engine core and its workers, by process id. May be called twice."""
        llm, self._llm = self._llm, None
        further, self._further = self._further, None
        if further is not None:
            await asyncio.to_thread(further.shutdown)
        if llm is not None:
            if llm.output_handler is not None:
                llm.output_handler.cancel()  # it would report the core's end as a failure
            await asyncio.to_thread(llm.shutdown, _SHUTDOWN_S)
            del llm
            gc.collect()  # AsyncLLM is in reference cycles, and logs errors if it is collected at interpreter exit
        await asyncio.to_thread(end_processes, self.process_ids, _SHUTDOWN_S)
        self._remove_files()
        self.process_ids = ()

    def _note_processes(self, before: frozenset[int]) -> None:
        self.process_ids = tuple(process_ids() - before)
        self._shared_files.update(mapped_files(self.process_ids, _SHARED_FILES))

    def _remove_files(self) -> None:
        """Remove the files' names, which ranks no longer need after mapping them."""
        while self._shared_files:
            self._shared_files.pop().unlink(missing_ok=True)

    def _import(self) -> None:
        prepare_environment(self._rollout, self._part)
        import vllm.v1.engine.async_llm  # noqa: F401

        from rollout.vllm.sampling import use_compact_logprobs

        use_compact_logprobs()

    def _build(self) -> None:
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.executor import Executor

        self._built.clear()
        try:
            arguments, headless = self._arguments(), self._part.number > 0
            config = arguments.create_engine_config(headless=headless)
            executor: type[Executor] = Executor.get_class(config)
            if on_cpu() and self._rollout.ranks > 1:
                from rollout.vllm.executor import ForkedRanks

                executor = ForkedRanks
            if headless:
                self._further = executor(config)
                return
            logs = arguments.enable_log_requests, not arguments.disable_log_stats
            self._llm = AsyncLLM(config, executor, log_requests=logs[0], log_stats=logs[1])
            processor: Any = self._llm.output_processor  # called with the tokens of every iteration
            process = processor.process_outputs

            def process_and_beat(*arguments: Any, **options: Any) -> Any:
                beat()
                return process(*arguments, **options)

            processor.process_outputs = process_and_beat
        finally:
            self._built.set()

    def _end_build(self, before: frozenset[int]) -> None:
        """End the core until the building thread, which waits for it and cannot be interrupted, gives up."""
        deadline = time.monotonic() + _BUILD_END_S
        while True:
            built = self._built.wait(_LOOK_AT_BUILD_S)
            self._note_processes(before)
            if built or time.monotonic() > deadline:
                break
            end_processes(self.process_ids, 0.0)
