"""GPU memory that another process on the same GPU maps into its address space (CUDA IPC).

A handle consists of the plain values in torch's sharing of CUDA storages; no object is unpickled. Devices are named by
UUID, because a GPU's index differs between processes that see different GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from slime_like.errors import WeightSyncError

_GRANULE = 1 << 21
_BYTES = (1, 4, 6)
"""Positions of the ``_share_cuda_`` values that are bytes: the handles of memory, reference counter and event."""


class DeviceMemory:
    """A buffer on the current device. Its handle is taken once, because torch counts the users of each handle.

    Attributes:
        buffer: (n,) uint8.
        handle: plain values.
    """

    def __init__(self, nbytes: int) -> None:
        self.buffer = torch.empty(-(-max(nbytes, 1) // _GRANULE) * _GRANULE, dtype=torch.uint8, device="cuda")
        values = self.buffer.untyped_storage()._share_cuda_()
        self.handle = {
            "device": gpu_uuid(values[0]),
            "shared": [value.hex() if place in _BYTES else value for place, value in enumerate(values)],
            "nbytes": self.buffer.numel(),
        }

    @staticmethod
    def map(handle: Mapping[str, Any]) -> Tensor:
        """Map the buffer of ``handle``, (n,) uint8. The mapping ends with the last tensor that views it.

        Raises:
            WeightSyncError: the GPU is not this process's current one.
        """
        index = torch.cuda.current_device()
        if gpu_uuid(index) != handle["device"]:
            raise WeightSyncError(
                f"the weights are on GPU {handle['device']}, and this worker computes on {gpu_uuid(index)}",
                code="gpu-unseen",
                remedy="use sync.transport: shared_memory, or gloo between hosts",
            )
        values = [bytes.fromhex(value) if place in _BYTES else value for place, value in enumerate(handle["shared"])]
        storage = torch.UntypedStorage._new_shared_cuda(index, *values[1:])
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (handle["nbytes"],), (1,))

    @staticmethod
    def collect() -> None:
        """Free dropped buffers that other processes no longer map."""
        torch.cuda.ipc_collect()


def gpu_uuid(index: int) -> str:
    """Return the GPU's name, which is the same in every process."""
    return str(torch.cuda.get_device_properties(index).uuid)
