"""vLLM behind ``RolloutEngine``: its AsyncLLM, with the engine core in a process of its own."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Awaitable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rollout.base import EngineBase, MemoryPart, one_line
from slime_like.errors import EngineError, SlimeLikeError, WeightSyncError
from slime_like.interfaces import BucketMetadata, Generation, GenerationRequest, PauseMode
from slime_like.system.processes import end_processes, is_alive, mapped_files, new_children, process_ids
from slime_like.system.resource_tracker import start_tracker
from slime_like.weights.wire import metadata_to_wire

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

    from slime_like.config import RunConfig
    from slime_like.models.dimensions import ModelDimensions

_SHUTDOWN_S = 3.0
"""For the engine core to end by itself; it has nothing to save, so afterwards it is killed."""
_HEALTH_TIMEOUT_S = 10.0
_BUILD_END_S = 60.0
"""For a start that was given up while vLLM was still imported or configured, before there is a core to end."""
_LOOK_AT_BUILD_S = 0.2
_LOOK_EVERY_S = 1.0
"""Between looks at the engine core's process while a call to it is under way."""
_SHARED_FILES = "/dev/shm/vllm_dist_"
"""Where vLLM's tensor-parallel CPU ranks exchange data; it leaves these files behind, and no tracker knows them."""

T = TypeVar("T")


class VllmEngine(EngineBase["AsyncLLM"]):
    """One vLLM engine of ``config.rollout.tensor`` ranks.

    Responses that were sampled with top-p or top-k (evaluation only) carry NaN logprobs: vLLM knows only those of the
    truncated distribution. On a CPU there is no memory to give back: ``sleep`` and ``wake`` change the state only.
    """

    def __init__(self, config: RunConfig, engine_index: int) -> None:
        super().__init__(config, engine_index, "vLLM")
        self._llm: AsyncLLM | None = None
        self._process_ids: tuple[int, ...] = ()
        self._shared_files: set[Path] = set()
        self._built = threading.Event()
        self._built.set()

    @staticmethod
    def refusal(dimensions: ModelDimensions, on_cuda: bool) -> str | None:
        """Why it cannot be trained with this engine on these devices, if so."""
        if dimensions.num_experts and not on_cuda:
            return (
                "vLLM cannot update the weights of a mixture-of-experts model on a CPU; use rollout.engine=sglang or "
                "transformers there"
            )
        return None

    async def start(self) -> None:
        """Load the model and start the engine core's process.

        Raises:
            EngineError: an engine argument is refused, the start fails, or it takes longer than
                ``rollout.start_timeout_s``.
        """
        self._begin_anew()
        start_tracker()
        before = process_ids()
        timeout = self._config.rollout.start_timeout_s
        try:
            async with asyncio.timeout(timeout):
                # In a call of its own: something that vLLM imports keeps the importing frames, and all they refer to.
                await asyncio.to_thread(self._import)
                llm: AsyncLLM = await asyncio.to_thread(self._build)
                self._llm = llm
                await llm.update_weight_version("0")
                # Asked once here, so that adding a request later never waits between its check and its registration.
                await llm.get_supported_tasks()
        except BaseException as error:
            await asyncio.to_thread(self._end_build, before)
            await self.stop()
            raise self._start_error(error, timeout) from error
        self._note_processes(before)
        self._remove_files()

    async def generate(self, request: GenerationRequest) -> list[Generation]:
        async with self._promising(request) as llm:
            output = await self._run(llm, request)
        from rollout.vllm.sampling import generations

        return generations(request, output, self._state.version)

    async def abort(self, request_id: str | None = None) -> None:
        llm = self._alive()
        await llm.abort(list(self._promised) if request_id is None else [request_id])

    async def connect(self, transport: str, rendezvous: dict[str, Any]) -> None:
        """Join the weight transport, anew if this engine was connected.

        Raises:
            EngineError: a mixture-of-experts model on a CPU, whose experts vLLM 0.32 reloads wrongly (its own
                ``reload_weights`` does, too), so that updates would be silently wrong.
        """
        from rollout.vllm.arguments import on_cpu

        if refusal := self.refusal(self._dimensions, on_cuda=not on_cpu()):
            raise EngineError(f"{self._name}: {refusal}")
        arguments = {"init_info": {"transport": transport, "rendezvous": rendezvous}}
        await self._sync_call("connect", self._workers("init_weight_transfer_engine", **arguments))

    async def stop(self) -> None:
        """End the engine core and its workers, by process id, within seconds. May be called twice."""
        llm, self._llm = self._llm, None
        if llm is not None:
            if llm.output_handler is not None:
                llm.output_handler.cancel()  # it would report the end of the core as a failure
            await asyncio.to_thread(llm.shutdown, _SHUTDOWN_S)
            del llm
            gc.collect()  # AsyncLLM sits in reference cycles, and complains when collected at interpreter exit
        await asyncio.to_thread(end_processes, self._process_ids, _SHUTDOWN_S)
        self._remove_files()
        self._process_ids = ()

    # ------------------------------------------------------------------------------------------------- see EngineBase
    def _alive(self) -> AsyncLLM:
        if self._llm is None:
            raise EngineError(f"{self._name} is not running; call start first")
        if self._llm.errored:
            raise EngineError(f"{self._name}: its process has died; {self._death}")
        return self._llm

    async def _is_alive(self) -> bool:
        """Asks the engine core's process, not only this one."""
        if self._llm is None or self._llm.errored:
            return False
        try:
            await asyncio.wait_for(self._llm.get_weight_version(), _HEALTH_TIMEOUT_S)
        except Exception:  # whatever a dead or hung core answers, the answer to "alive?" is no
            return False
        return True

    def _own_process_ids(self) -> tuple[int, ...]:
        return self._process_ids

    async def _freeze(self, mode: PauseMode) -> None:
        # The engine core's own call: AsyncLLM.pause_generation adds a fixed sleep that orders nothing we rely on.
        core = self._alive().engine_core
        call = core.pause_scheduler_async(mode=mode, clear_cache=True)
        await self._bounded(f"pause({mode})", self._while_alive(call))

    async def _thaw(self) -> None:
        await self._bounded("resume", self._while_alive(self._alive().resume_generation()))

    async def _open_update(self) -> None:
        await self._sync_call("begin_update", self._workers("open_update"))

    async def _take_bucket(self, bucket: BucketMetadata) -> None:
        call = self._workers("update_weights", update_info={"metadata": metadata_to_wire(bucket)})
        await self._sync_call("update", call)

    async def _received(self) -> tuple[dict[str, int], float]:
        answers = await self._sync_call("finish_update", self._workers("received_checksums"))
        received = [checksums for checksums, _ in answers]
        if any(other != received[0] for other in received):
            raise WeightSyncError(f"{self._name}: its tensor-parallel ranks received different bytes")
        return received[0], max(hash_s for _, hash_s in answers)

    async def _make_current(self, version: int) -> None:
        llm = self._alive()
        await self._sync_call("finish_update", self._workers("finish_weight_update"))
        await self._sync_call("finish_update", self._while_alive(llm.update_weight_version(str(version))))
        await self._sync_call("cache flush", self._while_alive(llm.reset_prefix_cache(reset_running_requests=True)))

    async def _close_update(self) -> None:
        await self._sync_call("closing a failed update", self._workers("finish_weight_update"))

    async def _give_memory_back(self, parts: Sequence[MemoryPart]) -> None:
        """Weights go to host memory. vLLM itself skips a part that is asleep."""
        if self._gives_memory_back():
            await self._bounded("sleep", self._while_alive(self._alive().sleep(level=1, mode="abort")))

    async def _take_memory(self, parts: Sequence[MemoryPart]) -> None:
        if self._gives_memory_back():
            await self._bounded("wake", self._while_alive(self._alive().wake_up(tags=list(parts))))

    # -------------------------------------------------------------------------------------------------------- helpers
    def _note_processes(self, before: Collection[int]) -> None:
        self._process_ids = tuple(new_children(before))
        self._shared_files.update(mapped_files(self._process_ids, _SHARED_FILES))

    def _remove_files(self) -> None:
        """Ranks that have mapped them need their names no more, and without names nothing of them can be left."""
        while self._shared_files:
            self._shared_files.pop().unlink(missing_ok=True)

    def _import(self) -> None:
        from rollout.vllm.arguments import prepare_environment

        prepare_environment(self._config)
        import vllm.v1.engine.async_llm  # noqa: F401

    def _build(self) -> AsyncLLM:
        from vllm.v1.engine.async_llm import AsyncLLM

        from rollout.vllm.arguments import engine_arguments

        self._built.clear()
        try:
            return AsyncLLM.from_engine_args(engine_arguments(self._config, self._index))
        finally:
            self._built.set()

    def _end_build(self, before: Collection[int]) -> None:
        """A thread that builds cannot be interrupted; it ends when the core does that it starts and waits for."""
        deadline = time.monotonic() + _BUILD_END_S
        while True:
            built = self._built.wait(_LOOK_AT_BUILD_S)
            self._note_processes(before)
            if built or time.monotonic() > deadline:
                break
            end_processes(self._process_ids, 0.0)

    def _start_error(self, error: BaseException, timeout: float) -> BaseException:
        if isinstance(error, TimeoutError):
            return EngineError(f"{self._name} did not start within rollout.start_timeout_s={timeout:g} s")
        if isinstance(error, SlimeLikeError) or not isinstance(error, Exception):
            return error
        return EngineError(f"{self._name} did not start: {one_line(error)}; {self._log}")

    async def _run(self, llm: AsyncLLM, request: GenerationRequest) -> RequestOutput:
        """The final output. vLLM's own exceptions become one sentence."""
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError

        from rollout.vllm.sampling import sampling_params

        prompt = tokens_input(list(request.prompt_tokens))
        try:
            parameters = sampling_params(request, self._dimensions)
            async for output in llm.generate(prompt, parameters, request.request_id):
                if output.finished:
                    return output
        except EngineDeadError as error:
            raise EngineError(f"{self._name} died while it ran request {request.request_id}; {self._death}") from error
        except Exception as error:  # vLLM's own classes change with its versions
            raise EngineError(f"request {request.request_id} failed on {self._name}: {one_line(error)}") from error
        raise EngineError(f"request {request.request_id} ended without an output on {self._name}")

    async def _workers(self, method: str, **arguments: Any) -> list[Any]:
        """What every worker's method gives.

        Raises:
            WeightSyncError: it failed on one of them; the first one's reason.
        """
        call = self._alive().collective_rpc("attempt", args=(method, arguments))
        answers = await self._while_alive(call)
        for _, failure in answers:
            if failure is not None:
                raise WeightSyncError(failure)
        return [result for result, _ in answers]

    def _gives_memory_back(self) -> bool:
        """False on a CPU. On CUDA, True or an error that says what to set."""
        from rollout.vllm.arguments import on_cpu, sleep_mode

        if on_cpu():
            return False
        if not sleep_mode(self._config):
            raise EngineError(
                f"{self._name} cannot give memory back; set cluster.placement=colocated, or "
                "rollout.engine_args.enable_sleep_mode=true"
            )
        return True

    async def _while_alive(self, call: Awaitable[T]) -> T:
        """The call's result. vLLM never answers calls that are under way when its process dies."""
        task = asyncio.ensure_future(call)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=_LOOK_EVERY_S)
                if not task.done():
                    self._alive()
                    if not all(map(is_alive, self._process_ids)):
                        raise EngineError(f"{self._name}: its process has died; {self._death}")
            return task.result()
        finally:
            task.cancel()
