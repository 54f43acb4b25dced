"""Offload of saved activations to host memory (``trainer.activation_offload``)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from backends.common.trainer.host_memory import HostPool

SMALLEST_BYTES = 1 << 16
"""Smaller tensors are not worth a copy."""

AHEAD_BYTES = 1 << 28
"""Bytes that backward finds on the device in advance: several layers' inputs under full recompute."""


@dataclass(slots=True, eq=False)
class OffloadedTensor:
    """A tensor in host memory.

    Attributes:
        copy: the copy in host memory.
        before: the tensor saved before it in the same forward pass; backward needs it next.
        fetched: the copy back on the device, from its start until backward takes it.
        ready: the end of that copy, on CUDA.
    """

    copy: Any
    device: torch.device
    nbytes: int
    before: OffloadedTensor | None
    fetched: Tensor | None = None
    ready: torch.cuda.Event | None = None


class ActivationOffload:
    """Offload of saved tensors to (pinned) host memory in forward, and back in backward before they are needed.

    On CUDA the copies run on a separate stream and overlap with computation. A CPU makes the same copies, without
    benefit. Weights stay in place. With ``trainer.recompute: full``, only the inputs of layers are saved.
    """

    def __init__(self, modules: Sequence[torch.nn.Module], pool: HostPool) -> None:
        self._modules = list(modules)
        self._weights: set[int] = set()
        self._pool = pool
        self._last: OffloadedTensor | None = None

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream()

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Wrap a forward pass."""
        # Weights and their views share storages, which move when a trainer is offloaded, so look them up each time.
        self._weights = {p.untyped_storage()._cdata for module in self._modules for p in module.parameters()}
        with torch.autograd.graph.saved_tensors_hooks(self._to_host, self._to_device):
            yield
        self._last = None

    def _stays(self, tensor: Tensor) -> bool:
        return tensor.nbytes < SMALLEST_BYTES or tensor.untyped_storage()._cdata in self._weights

    def _to_host(self, tensor: Tensor) -> Tensor | OffloadedTensor:
        if self._stays(tensor):
            return tensor
        self._last = OffloadedTensor(self._copy(tensor), tensor.device, tensor.nbytes, self._last)
        return self._last

    def _to_device(self, saved: Tensor | OffloadedTensor) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        ahead = 0
        needed: OffloadedTensor | None = saved
        while needed is not None and ahead <= AHEAD_BYTES:
            if needed.fetched is None:
                needed.fetched = self._fetch(needed)
            ahead, needed = ahead + needed.nbytes, needed.before
        tensor, saved.fetched = saved.fetched, None
        assert tensor is not None
        if saved.ready is not None:
            torch.cuda.current_stream().wait_event(saved.ready)
            tensor.record_stream(torch.cuda.current_stream())
        return tensor

    def _copy(self, tensor: Tensor) -> Any:
        host = self._pool.take(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        if not tensor.is_cuda:
            return host.copy_(tensor)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._stream)  # its memory must not be reused before the copy is done
        return host

    def _fetch(self, saved: OffloadedTensor) -> Tensor:
        if saved.device.type != "cuda":
            return saved.copy
        with torch.cuda.stream(self._stream):
            tensor = saved.copy.to(saved.device, non_blocking=True)
            saved.ready = self._stream.record_event()
        return tensor
