"""Low-rank factors in a worker of vLLM, which applies them to requests that name the adapter."""

from typing import Any

from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper

from rollout.adapter import taken
from rollout.vllm.arguments import LORA_ID
from slime_like.errors import WeightSyncError


def serve(worker: Any, settings: dict[str, Any], *source: Any) -> None:
    """Replace the adapter by factors from ``source``. vLLM scales B in place, so they must be copies.

    Raises:
        WeightSyncError: vLLM has no such module. It would ignore the factors.
    """
    lora = worker.model_runner.lora_manager
    manager = lora._adapter_manager
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    model = LoRAModel.from_lora_tensors(
        LORA_ID,
        taken(worker.weight_transfer_engine.receiver, *source),
        PEFTHelper.from_dict(settings),
        device="cpu",
        dtype=lora.lora_config.lora_dtype,
        weights_mapper=mapper and mapper.get_rename_mapper(),
    )
    manager.remove_adapter(LORA_ID)
    manager.add_adapter(model)  # packs the factors of fused modules
    if unknown := model.loras.keys() - manager.modules.keys():
        raise WeightSyncError(f"vLLM has no module for the factors of {min(unknown)}", code="unknown-tensor")
    manager.activate_adapter(LORA_ID)
