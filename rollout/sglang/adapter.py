"""Low-rank factors in SGLang, which applies them to requests that name the adapter."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from rollout.adapter import AdapterTarget, Initial, taken
from slime_like.config import ModelConfig
from slime_like.errors import WeightSyncError
from slime_like.weights.adapter import ADAPTER

if TYPE_CHECKING:
    from rollout.sglang.scheduler import EngineScheduler


class SglangAdapter(AdapterTarget):
    """The adapter of an SGLang engine, whose process ``call`` reaches."""

    def __init__(self, model: ModelConfig, call: Callable[..., Awaitable[Any]]) -> None:
        super().__init__(model)
        self._call = call

    async def _serve(self, initial: Initial | None) -> None:
        await self._receiver("sglang.adapter:serve", self.settings, initial)

    async def _receiver(self, method: str, *arguments: Any) -> list[Any]:
        answers: list[Any] = await self._call("receive", method, *arguments)
        return answers

    async def _finish_update(self, version: int) -> None:
        await self._serve(None)
        await self._call("finish_update", version)


def serve(scheduler: EngineScheduler, settings: dict[str, Any], initial: Initial | None) -> None:
    """Replace the adapter of a rank by the ``taken`` factors.

    SGLang's own calls would wait until no request uses the adapter, but frozen requests do.

    Raises:
        WeightSyncError: SGLang rejects the factors.
    """
    from sglang.srt.lora.lora_registry import LoRARef

    manager = scheduler.tp_worker.model_runner.lora_manager
    adapter = LoRARef(lora_id=ADAPTER, lora_name=ADAPTER, lora_path="__tensor__", pinned=False)
    manager.unload_lora_adapter(adapter)
    factors = taken(scheduler.receiver, initial)
    loaded = manager.load_lora_adapter_from_tensors(adapter, factors, settings)
    if not loaded.success:
        raise WeightSyncError(loaded.error_message, code="adapter-not-loaded")
    manager.fetch_new_loras({None, ADAPTER})  # otherwise the next step would, whose failure ends the process
