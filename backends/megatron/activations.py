"""Offload of saved activations to host memory (``trainer.activation_offload``)."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SMALLEST_BYTES = 1 << 16
"""Less is not worth a copy."""


@dataclass(slots=True)
class _OnHost:
    values: Tensor
    device: torch.device


class ActivationOffload:
    """Copies saved tensors to (pinned) host memory in forward, and back when backward asks for them.

    On CUDA the copies run on a separate stream: to the host behind the computation that follows; back in time for
    the operation that asked, so that backward waits for them. On a CPU the very same copies are made, to no advantage.
    Weights stay where they are.
    """

    def __init__(self, modules: Sequence[torch.nn.Module]) -> None:
        self._modules = list(modules)
        self._weights: set[int] = set()
        self._stream: torch.cuda.Stream | None = None

    def saving(self) -> contextlib.AbstractContextManager[None]:
        """Around a forward pass."""
        # Weights and views of them share storages, which move when a trainer is offloaded: look each time.
        self._weights = {p.untyped_storage().data_ptr() for module in self._modules for p in module.parameters()}
        return torch.autograd.graph.saved_tensors_hooks(self._to_host, self._to_device)

    def _to_host(self, tensor: Tensor) -> Tensor | _OnHost:
        storage = tensor.untyped_storage()
        if tensor.numel() * tensor.element_size() < SMALLEST_BYTES or storage.data_ptr() in self._weights:
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
        if not tensor.is_cuda:
            return _OnHost(host.copy_(tensor), tensor.device)
        stream = self._copies()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)  # its memory is not to be used again before the copy is done
        return _OnHost(host, tensor.device)

    def _to_device(self, saved: Tensor | _OnHost) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if saved.device.type != "cuda":
            return saved.values
        stream = self._copies()
        with torch.cuda.stream(stream):
            tensor = saved.values.to(saved.device, non_blocking=True)
        torch.cuda.current_stream().wait_stream(stream)
        tensor.record_stream(torch.cuda.current_stream())
        return tensor

    def _copies(self) -> torch.cuda.Stream:
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        return self._stream
