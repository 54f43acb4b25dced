"""Low-rank factors in vLLM, which applies them to requests that name the adapter."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from rollout.adapter import AdapterTarget, Initial, taken
from slime_like.config import ModelConfig
from slime_like.errors import WeightSyncError
from slime_like.weights.adapter import ADAPTER

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

    from rollout.vllm.core import EngineCore
    from rollout.vllm.worker import WorkerExtension

_ID = 1


class VllmAdapter(AdapterTarget):
    """The adapter of a vLLM engine.

    Args:
        flush: sets the version, and drops cached keys and values.
    """

    def __init__(self, model: ModelConfig, core: EngineCore, flush: Callable[[int], Awaitable[None]]) -> None:
        super().__init__(model)
        self._core, self._flush = core, flush

    def request(self) -> LoRARequest:
        """Return the adapter as requests name it. Its path is not read, because it is loaded."""
        from vllm.lora.request import LoRARequest

        return LoRARequest(ADAPTER, _ID, ADAPTER)

    async def _serve(self, initial: Initial | None) -> None:
        await self._core.workers("vllm.adapter:serve", settings=self.settings, initial=initial)

    async def _receiver(self, method: str, *arguments: Any) -> list[Any]:
        return await self._core.workers("vllm.adapter:receiver", call=(method, *arguments))

    async def _finish_update(self, version: int) -> None:
        await self._serve(None)
        await self._flush(version)


# --------------------------------------------------------------------------------------------------- in a rank's worker
def receiver(worker: WorkerExtension, call: tuple[str, Any]) -> Any:
    """Make a call of a method of the rank's receiver."""
    method, *arguments = call
    return getattr(worker.weight_transfer_engine.receiver, method)(*arguments)


def serve(worker: WorkerExtension, settings: dict[str, Any], initial: Initial | None) -> None:
    """Replace the adapter by the ``taken`` factors. vLLM scales B in place, so they must be copies.

    Raises:
        WeightSyncError: vLLM has no such module. It would ignore the factors.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    lora: Any = worker.model_runner.lora_manager
    manager, helper = lora._adapter_manager, PEFTHelper.from_dict(settings)
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    model = LoRAModel.from_lora_tensors(
        _ID,
        taken(worker.weight_transfer_engine.receiver, initial),
        helper,
        device="cpu",
        dtype=lora.lora_config.lora_dtype,
        weights_mapper=mapper and mapper.get_rename_mapper(),
    )
    manager.remove_adapter(_ID)
    manager.add_adapter(model)  # packs the factors of fused modules
    if unknown := model.loras.keys() - manager.modules.keys():
        problem = f"vLLM has no module for the factors of {min(unknown)}"
        raise WeightSyncError(problem, code="unknown-tensor", remedy="use model.lora.sync=merged")
    manager.activate_adapter(_ID)
