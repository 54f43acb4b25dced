"""Low-rank factors in a scheduler of SGLang, which applies them to requests that name the adapter."""

from typing import Any

from sglang.srt.lora.lora_registry import LoRARef

from rollout.adapter import taken
from slime_like.errors import WeightSyncError
from slime_like.weights.adapter import ADAPTER


def serve(scheduler: Any, settings: dict[str, Any], *source: Any) -> None:
    """Replace the adapter by factors from ``source``.

    SGLang's own calls would wait until no request uses the adapter, but frozen requests do.

    Raises:
        WeightSyncError: SGLang rejects the factors.
    """
    manager = scheduler.tp_worker.model_runner.lora_manager
    adapter = LoRARef(lora_id=ADAPTER, lora_name=ADAPTER, lora_path="__tensor__", pinned=False)
    manager.unload_lora_adapter(adapter)
    loaded = manager.load_lora_adapter_from_tensors(adapter, taken(scheduler.receiver, *source), settings)
    if not loaded.success:
        raise WeightSyncError(loaded.error_message, code="adapter-not-loaded")
    manager.fetch_new_loras({None, ADAPTER})  # otherwise the next step would, whose failure ends the process
