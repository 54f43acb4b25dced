"""Extension of vLLM's worker process that receives, hashes and loads weights and adapters.

vLLM imports this module in every worker, because the engine's ``worker_extension_cls`` is ``WorkerExtension``. The
import registers the weight-transfer engine.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Module
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.v1.sample import rejection_sampler

from rollout.vllm.arguments import BACKEND, LORA_ID
from rollout.weight_update import RankAnswer, attempt, function_of, take_factors
from slime_like.errors import WeightSyncError
from slime_like.interfaces import BucketMetadata
from slime_like.system.gpus import stay_near
from slime_like.system.processes import keep_freed_memory
from slime_like.weights.received import WeightReceiver
from slime_like.weights.transport import gpu_uuid

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker as _Worker
else:
    _Worker = object  # vLLM makes the extension a base class of its worker


def _expand(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: float = 0, replace_to: float = 0
) -> Tensor:
    """Repeat each request's value of ``x`` (batch,) for its drafted tokens. vLLM 0.32 has a kernel for CPUs that writes
    floats to a copy, so temperature, top-p and top-k of drafted tokens would be what their memory had before."""
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
    return torch.where(x == replace_from, replace_to, x).to(x.dtype).repeat_interleave(counts)[:num_tokens]


class BucketTransferEngine(WeightTransferEngine[Any, Any]):
    """Weight-transfer engine that passes buckets with Hugging Face names to vLLM's layerwise reload."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.receiver = WeightReceiver(self.parallel_config.rank)
        self._reloading = False
        _end_with_parent()
        if self.device.type == "cpu":
            keep_freed_memory()
            rejection_sampler.expand_batch_to_tokens = _expand
        else:  # SGLang's workers do this themselves
            stay_near(f"GPU-{gpu_uuid(self.device.index)}")

    def init_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.receiver.connect(**init_info)

    def start_weight_update(self) -> None:
        # A failed update leaves half-loaded layers, which would count for this update.
        self._end_reload()
        self.receiver.begin_update()
        initialize_layerwise_reload(self.model)
        self._reloading = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class would synchronize an accelerator, which a CPU lacks. Loading and hashing use this thread's
        # stream anyway.
        self.receive_weights(update_info)

    def receive_weights(self, update_info: dict[str, Any]) -> None:
        """Load copies, because layerwise reload keeps a layer's tensors until it has all, maybe in a later bucket."""
        self.model.load_weights(self.receiver.copies(BucketMetadata.from_wire(update_info), self.device))

    def finish_weight_update(self) -> None:
        self._end_reload()

    def shutdown(self) -> None:
        self.receiver.close()

    def _end_reload(self) -> None:
        if self._reloading:
            self._reloading = False
            finalize_layerwise_reload(self.model, self.model_config)
            _pack_tied_heads(self.model)


class WorkerExtension(_Worker):
    """Methods added to vLLM's worker. vLLM calls ``attempt`` through ``collective_rpc``."""

    weight_transfer_engine: BucketTransferEngine

    @property
    def receiver(self) -> WeightReceiver:
        return self.weight_transfer_engine.receiver

    def attempt(self, method: str, *arguments: Any) -> RankAnswer:
        """Call a method of the receiver, or a function (``function_of``), and return errors as answers.

        vLLM 0.32 stops reading its workers' replies at the first exception. The other workers' replies would stay in
        their queues and be taken as answers to the next call.
        """
        return attempt(lambda: function_of(self, method)(*arguments))


def begin_update(worker: Any) -> None:
    """Start a weight update, even if the last one is still open because it failed on another worker."""
    end_update(worker)
    worker.start_weight_update()


def load(worker: Any, metadata: dict[str, Any]) -> None:
    worker.update_weights(metadata)


def end_update(worker: Any) -> None:
    """Finish the weight update, if one is open."""
    if worker._weight_update_active:
        worker.finish_weight_update()


def serve_adapter(worker: Any, settings: dict[str, Any], *source: Any) -> None:
    """Replace the adapter by factors from ``source``. vLLM scales B in place, so they must be copies.

    Raises ``WeightSyncError`` if vLLM has no such module. It would ignore the factors.
    """
    lora = worker.model_runner.lora_manager
    manager = lora._adapter_manager
    mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
    model = LoRAModel.from_lora_tensors(
        LORA_ID,
        take_factors(worker.receiver, *source),
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


def make_stage_buffer(worker: Any) -> None:
    """Make the buffer for hidden states of the previous stage. vLLM 0.32 does so in a profile, which a CPU skips."""
    runner = worker.model_runner
    if runner.intermediate_tensors is None:
        size, dtype = runner.max_num_tokens, runner.model_config.dtype
        runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(size, dtype, runner.device)


def _pack_tied_heads(model: Module) -> None:
    """Pack every tied head's weight again for matrix products on a CPU.

    vLLM packs a layer's weight after loading it. A tied weight is loaded with the embedding, so after a reload the head
    would still use its old packed weight.
    """
    heads = [module for module in model.modules() if isinstance(module, ParallelLMHead)]
    embeddings = [module for module in model.modules() if type(module) is VocabParallelEmbedding]
    for head in heads:
        if hasattr(head, "cpu_linear") and any(head.weight is embedding.weight for embedding in embeddings):
            head.quant_method.process_weights_after_loading(head)


def _end_with_parent() -> None:
    """End this process when its parent dies, in whatever way."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        os._exit(1)  # an exception would not end the main thread, which may wait in a collective

    threading.Thread(target=wait, name="end-with-parent", daemon=True).start()


WeightTransferEngineFactory.register_engine(BACKEND, BucketTransferEngine)
