"""Moving a trainer's weights, gradients and optimizer state between device and host memory (colocated mode)."""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer


def to_host(chunks: Sequence[DistributedDataParallel], optimizer: Any, keep_weights: bool = False) -> None:
    """Free the device. Gradients are dropped: a step must not be open. Without CUDA there is nothing to move.

    May be called again, first with ``keep_weights``, then without.
    """
    if not torch.cuda.is_available():
        return
    for chunk in chunks:
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            buffer.offload_to_cpu(move_params=not keep_weights, move_grads=True)
        if not keep_weights:
            _move_unbuffered(chunk, torch.device("cpu"))
    for part in _on_device(optimizer):
        part.offload_to_cpu()
    torch.cuda.empty_cache()


def to_device(chunks: Sequence[DistributedDataParallel], optimizer: Any) -> None:
    """The inverse of ``to_host``; gradients come back as zeros."""
    if not torch.cuda.is_available():
        return
    for chunk in chunks:
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            buffer.reload_from_cpu(move_params=True, move_grads=True)
        _move_unbuffered(chunk, torch.device("cuda", torch.cuda.current_device()))
    for part in _on_device(optimizer):
        part.restore_from_cpu()


def _on_device(optimizer: Any) -> list[Any]:
    """Megatron's optimizers whose state is on the device. With ``trainer.optimizer.offload`` it never is."""
    return [part for part in optimizer.chained_optimizers if not isinstance(part.optimizer, HybridDeviceOptimizer)]


def _move_unbuffered(chunk: DistributedDataParallel, device: torch.device) -> None:
    """Only the distributed optimizer keeps weights in DDP's buffers; others are moved one by one."""
    if chunk.ddp_config.use_distributed_optimizer:
        return
    for parameter in chunk.module.parameters():
        parameter.data = parameter.data.to(device)
