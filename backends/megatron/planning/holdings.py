"""Memory that one rank holds throughout a run, counted from its tensors: on shapes, or in a real trainer."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from torch import Tensor

from backends.megatron.optimizer import Optimizer


@dataclass(frozen=True, slots=True)
class Holdings:
    """One rank's memory, in bytes, except for ``parameters``, their number; see ``TrainerMemory``."""

    parameters: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    host_optimizer_bytes: int


_HOST_COPIES = 4
"""float32 copies of every parameter updated in host memory: main weight, gradient, both moments."""


def holdings_of(
    chunks: Sequence[torch.nn.Module], wrapped: Sequence[DistributedDataParallel], optimizer: Optimizer
) -> Holdings:
    """Count one rank's memory after the optimizer's first step."""
    weights = [parameter for chunk in chunks for parameter in chunk.parameters()]
    gradients = [buffer.grad_data for chunk in wrapped for buffer in chunk.buffers + chunk.expert_parallel_buffers]
    on_device, on_host = _optimizer_bytes(optimizer, weights)
    return Holdings(
        parameters=sum(parameter.numel() for parameter in weights),
        parameter_bytes=_storage_bytes(weights),
        gradient_bytes=_storage_bytes(gradients),
        optimizer_bytes=on_device,
        host_optimizer_bytes=on_host,
    )


def _storage_bytes(tensors: Iterable[Tensor], without: Iterable[Tensor] = ()) -> int:
    """Return the bytes of the tensors' storages, each once, except storages shared with ``without``."""
    known = {tensor.untyped_storage()._cdata for tensor in without}
    found = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(nbytes for key, nbytes in found.items() if key not in known)


def _optimizer_bytes(optimizer: Optimizer, weights: Sequence[Tensor]) -> tuple[int, int]:
    """Return the bytes of main weights and optimizer state (after its first step) on the device and in host memory."""
    parts = [part.optimizer for part in optimizer.parts]
    on_host = [part for part in parts if isinstance(part, HybridDeviceOptimizer)]
    held = [tensor for part in parts if part not in on_host for tensor in (*_parameters(part), *_state(part))]
    numel = sum(parameter.numel() for part in on_host for parameter in _parameters(part))
    return _storage_bytes(held, without=weights), numel * 4 * _HOST_COPIES


def _parameters(optimizer: Any) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _state(optimizer: Any) -> Iterator[Tensor]:
    """Yield moments. Leaves out the step's number, one scalar per parameter."""
    for state in optimizer.state.values():
        yield from (value for name, value in state.items() if isinstance(value, Tensor) and name != "step")
