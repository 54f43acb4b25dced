"""vLLM, with the engine core in a separate process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from rollout.base import EngineBase, MemoryPart
from rollout.limits import on_cpu
from rollout.vllm.arguments import LORA_ID, SLEEP_ARGUMENT, engine_arguments, returns_masks, sleep_level
from rollout.vllm.core import EngineCore
from rollout.vllm.limits import LIMITS
from slime_like.config import RunConfig
from slime_like.errors import EngineError
from slime_like.hosting.faults import one_line
from slime_like.interfaces import BucketMetadata, Generation, GenerationRequest, PauseMode
from slime_like.interfaces.engine import WHOLE, EngineNode
from slime_like.models.dimensions import ModelDimensions
from slime_like.weights.adapter import ADAPTER

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM


class VllmEngine(EngineBase["AsyncLLM"]):
    """One vLLM engine, or its ``part``, with ``config.rollout.ranks`` ranks in all.

    Evaluation with a truncated distribution returns NaN logprobs, because vLLM has only those over the truncated one.
    So does greedy evaluation if the engine returns masks. On a CPU, ``sleep`` and ``wake`` release no memory.
    """

    limits = LIMITS
    sleep_argument = SLEEP_ARGUMENT
    serve_adapter = "vllm.worker:serve_adapter"
    returns_supports = True
    returns_routes = True

    def __init__(self, config: RunConfig, engine_index: int, part: EngineNode = WHOLE) -> None:
        super().__init__(config, engine_index, "vLLM", part)
        arguments = partial(engine_arguments, config, engine_index, part)
        self._core = EngineCore(config.rollout, arguments, self._faults, part)
        self._masks = False

    @staticmethod
    def refusal(dimensions: ModelDimensions, on_cuda: bool) -> str | None:
        """Return the reason why such a model cannot be trained with vLLM on these devices, or ``None``."""
        if dimensions.num_experts and not on_cuda:
            problem = "vLLM cannot update the weights of a mixture of experts on a CPU"
            return f"{problem}; use rollout.engine=sglang or transformers"
        return None

    async def generate(self, request: GenerationRequest) -> list[Generation]:
        async with self._promising(request) as llm:
            output = await self._run(llm, request)
        from rollout.vllm.sampling import generations

        return generations(request, output, self._state.version, self._dimensions, self._masks)

    async def connect(self, transport: str, rendezvous: dict[str, Any]) -> None:
        """Join the transport. Not for a mixture of experts on a CPU, which vLLM 0.32 silently reloads wrongly."""
        if refusal := self.refusal(self._dimensions, on_cuda=not on_cpu()):
            raise EngineError(refusal, code="model-not-served", who=self._name)
        await super().connect(transport, rendezvous)

    # ------------------------------------------------------------------------------------------------- see EngineHooks
    async def _start(self) -> None:
        await self._core.start()
        self._masks = returns_masks(self._config)  # after the start, which sets how to look for CUDA

    async def stop(self) -> None:
        await self._core.stop()

    def _alive(self) -> AsyncLLM:
        return self._core.alive()

    async def _ping(self) -> None:
        await self._core.ping()

    def _own_process_ids(self) -> tuple[int, ...]:
        return self._core.process_ids

    async def _freeze(self, mode: PauseMode) -> None:
        # Not AsyncLLM.pause_generation, which adds a fixed sleep.
        core = self._alive().engine_core
        await self._core.while_alive(core.pause_scheduler_async(mode=mode, clear_cache=True))

    async def _thaw(self) -> None:
        await self._core.while_alive(self._alive().resume_generation())

    async def _receive(self, method: str, *arguments: Any) -> list[Any]:
        return await self._core.workers(method, *arguments)

    async def _begin_update(self) -> None:
        await self._receive("vllm.worker:begin_update")

    async def _update(self, bucket: BucketMetadata) -> None:
        await self._receive("vllm.worker:load", bucket.to_wire())

    async def _finish_update(self, version: int) -> None:
        await self._receive("vllm.worker:end_update")
        llm = self._alive()
        await self._core.while_alive(llm.update_weight_version(str(version)))
        await self._core.while_alive(llm.reset_prefix_cache(reset_running_requests=True))

    async def _give_memory_back(self, parts: Sequence[MemoryPart], keep_weights: bool) -> None:
        """Drop the weights or move them to host memory. vLLM skips parts that are asleep."""
        level = sleep_level(keep_weights, self._state.is_whole, self._dimensions)
        await self._core.while_alive(self._alive().sleep(level=level, mode="abort"))

    async def _take_memory(self, parts: Sequence[MemoryPart]) -> None:
        await self._core.while_alive(self._alive().wake_up(tags=list(parts)))

    async def _run(self, llm: AsyncLLM, request: GenerationRequest) -> RequestOutput:
        """Return the final output. Converts vLLM's exceptions."""
        from vllm.inputs.engine import tokens_input
        from vllm.lora.request import LoRARequest
        from vllm.v1.engine.exceptions import EngineDeadError

        from rollout.vllm.sampling import sampling_params

        prompt = tokens_input(list(request.prompt.token_ids))
        try:
            parameters = sampling_params(request, self._dimensions, self._masks)
            # The path is not read, because the adapter is loaded.
            adapter = LoRARequest(ADAPTER, LORA_ID, ADAPTER) if ADAPTER in self.targets else None
            if request.sampling.stop:
                llm.output_processor.tokenizer = self._stop_texts.tokenizer
            async for output in llm.generate(prompt, parameters, request.request_id, lora_request=adapter):
                if output.finished:
                    return output
        except EngineDeadError as error:
            raise self._faults.died(f"while it ran request {request.request_id}") from error
        except Exception as error:  # vLLM's own classes change with its versions
            problem = f"request {request.request_id} failed on {self._name}: {one_line(error)}"
            raise EngineError(problem, code="request-failed") from error
        problem = f"request {request.request_id} ended without an output on {self._name}"
        raise EngineError(problem, code="no-output")
