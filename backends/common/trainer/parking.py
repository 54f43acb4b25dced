"""Temporary release of device memory. Its contents wait in host memory that is locked once and reused.

Storages are emptied and refilled in place, so tensors, their views and autograd's gradient accumulators stay the same
objects. Assigning ``parameter.data`` on another device would drop the parameter's accumulator (torch,
``VariableHooks::set_data``), and with it the hook through which Megatron's DDP receives the gradient.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage

from backends.common.trainer.host_memory import HostMemory, rounded, wait_for_device


@dataclass(frozen=True, slots=True)
class _Parked:
    storage: UntypedStorage
    nbytes: int
    contents: Tensor | None


class Parking:
    """Host memory for what leaves the device. It grows to the most that was parked at a time."""

    def __init__(self) -> None:
        self._arenas: list[HostMemory] = []
        self._parked: list[_Parked] = []

    def park(self, tensors: Iterable[Tensor]) -> None:
        """Copy the tensors' storages to the host and free them. Skips storages that are already parked."""
        storages = list(_filled(tensors))
        parked = []
        for storage, place in zip(storages, self._places(storages), strict=True):
            place.copy_(_bytes_of(storage), non_blocking=True)
            parked.append(_Parked(storage, storage.nbytes(), place))
        self._free(parked)

    def discard(self, tensors: Iterable[Tensor]) -> None:
        """Free the tensors' storages without saving them: ``restore`` fills them with zeros."""
        self._free([_Parked(storage, storage.nbytes(), None) for storage in _filled(tensors)])

    def restore(self) -> None:
        """Restore all storages' memory and contents."""
        for one in self._parked:
            one.storage.resize_(one.nbytes)
            if one.contents is None:
                _bytes_of(one.storage).zero_()
            else:
                _bytes_of(one.storage).copy_(one.contents, non_blocking=True)
        wait_for_device()  # the host memory may be overwritten afterwards
        self._parked = []
        for arena in self._arenas:
            arena.clear()

    def close(self) -> None:
        """Drop the memory and everything parked in it; see ``HostMemory.close``."""
        for arena in self._arenas:
            arena.close()
        self._arenas, self._parked = [], []

    def _free(self, parked: list[_Parked]) -> None:
        wait_for_device()
        for one in parked:
            one.storage.resize_(0)
        self._parked += parked

    def _places(self, storages: list[UntypedStorage]) -> Iterator[Tensor]:
        """Yield room in host memory for each storage."""
        left = sum(rounded(storage.nbytes()) for storage in storages)
        for storage in storages:
            needed = rounded(storage.nbytes())
            arena = next((arena for arena in self._arenas if arena.free >= needed), None)
            if arena is None:
                arena = HostMemory(left)
                self._arenas.append(arena)
            left -= needed
            yield arena.take(storage.nbytes())


def _filled(tensors: Iterable[Tensor]) -> Iterator[UntypedStorage]:
    """Yield each storage of the tensors that holds memory, once."""
    seen = set()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            yield storage


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
