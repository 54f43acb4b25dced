"""Offload of saved activations to host memory (``trainer.activation_offload``)."""

import contextlib
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from backends.common.trainer.host_memory import HostPool

SMALLEST_BYTES = 1 << 16
"""Less is not worth a copy."""


class ActivationOffload:
    """Copies saved tensors to (pinned) host memory in forward, and back when backward asks for them.

    On CUDA the copies run on a separate stream: to the host behind the computation that follows; back in time for
    the operation that asked, so that backward waits for them. On a CPU the very same copies are made, to no advantage.
    Weights stay where they are.
    """

    def __init__(self, modules: Sequence[torch.nn.Module], pool: HostPool) -> None:
        self._modules = list(modules)
        self._weights: set[int] = set()
        self._pool = pool

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream()

    def saving(self) -> contextlib.AbstractContextManager[None]:
        """Around a forward pass."""
        # Weights and views of them share storages, which move when a trainer is offloaded: look each time.
        self._weights = {p.untyped_storage()._cdata for module in self._modules for p in module.parameters()}
        return torch.autograd.graph.saved_tensors_hooks(self._to_host, self._to_device)

    def _stays(self, tensor: Tensor) -> bool:
        return tensor.nbytes < SMALLEST_BYTES or tensor.untyped_storage()._cdata in self._weights

    def _to_host(self, tensor: Tensor) -> Tensor | tuple[Tensor, torch.device]:
        if self._stays(tensor):
            return tensor
        host = self._pool.take(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        if not tensor.is_cuda:
            return host.copy_(tensor), tensor.device
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)  # its memory is not to be used again before the copy is done
        return host, tensor.device

    def _to_device(self, saved: Tensor | tuple[Tensor, torch.device]) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        host, device = saved
        if device.type != "cuda":
            return host
        with torch.cuda.stream(self._stream):
            tensor = host.to(device, non_blocking=True)
        torch.cuda.current_stream().wait_stream(self._stream)
        tensor.record_stream(torch.cuda.current_stream())
        return tensor
