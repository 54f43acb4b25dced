"""Host memory for device data, and temporary release of device memory whose contents wait there.

Host memory is locked once, so copies run at full speed, and reused. Released storages are emptied and refilled in
place, so tensors, their views and autograd's gradient accumulators stay the same objects. Assigning ``parameter.data``
on another device would drop the parameter's accumulator (torch, ``VariableHooks::set_data``), and with it the hook
through which Megatron's DDP receives the gradient.
"""

import mmap
import weakref
from bisect import insort
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, UntypedStorage

from slime_like.system.pinning import LockedMemory

_ALIGNMENT = 512
_SEGMENT_BYTES = 256 << 20


class HostMemory:
    """One piece of host memory, handed out from its beginning and locked if there is a GPU."""

    def __init__(self, nbytes: int) -> None:
        self._memory = _new_memory(nbytes)
        self._used = 0

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    @property
    def free(self) -> int:
        return self.nbytes - self._used

    def take(self, nbytes: int) -> Tensor:
        """Take (nbytes,) uint8 with a storage of that size, so saving it writes nothing else."""
        start = self._used
        self._used += round_up(nbytes)
        return self._memory.tensor(start, nbytes) if nbytes else torch.empty(0, dtype=torch.uint8)

    def clear(self) -> None:
        """Start handing out from the beginning again."""
        self._used = 0

    def close(self) -> None:
        """Unlock it. Its pages are freed with the last tensor that was taken."""
        self._memory.let_go()


class HostCopies:
    """Host copies of tensors. Later copies reuse the same memory.

    A checkpoint's state and frozen weights keep their size throughout a run, so memory is locked once.
    """

    def __init__(self) -> None:
        self._memory: HostMemory | None = None

    def of(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Make contiguous copies of tensors on any device. Overwrites the previous copies."""
        sources = [tensor.detach() for tensor in tensors]
        needed = sum(round_up(source.nbytes) for source in sources)
        if self._memory is None or needed > self._memory.nbytes:
            self.close()
            self._memory = HostMemory(needed)
        self._memory.clear()
        copies = []
        for source in sources:
            copy = self._memory.take(source.nbytes).view(source.dtype).view(source.shape)
            copies.append(copy.copy_(source, non_blocking=True))
        wait_for_device()
        return copies

    def close(self) -> None:
        """Drop the memory; see ``HostMemory.close``."""
        if self._memory is not None:
            self._memory.close()
        self._memory = None


class HostPool:
    """Pieces of host memory for short-lived tensors, from segments that are locked once and kept.

    torch's pinned memory comes in powers of two, and each new size takes the system milliseconds.
    """

    def __init__(self, segment_bytes: int = _SEGMENT_BYTES) -> None:
        self._segment_bytes = segment_bytes
        self._segments: list[_Segment] = []

    def take(self, nbytes: int) -> Tensor:
        """Take (nbytes,) uint8, at least one byte. The memory is reused once no tensor uses it."""
        for segment in self._segments:
            if (piece := segment.take(nbytes)) is not None:
                return piece
        segment = _Segment.of(max(self._segment_bytes, round_up(nbytes)))
        self._segments.append(segment)
        piece = segment.take(nbytes)
        assert piece is not None
        return piece

    def close(self) -> None:
        """Drop the segments; see ``HostMemory.close``."""
        for segment in self._segments:
            segment.memory.let_go()
        self._segments = []


@dataclass(frozen=True, slots=True)
class _Segment:
    """Memory whose pieces are taken from the lowest free place.

    Attributes:
        free: (start, end) of unused ranges, in order.
        returned: (start, end) of pieces no longer in use; appended by whichever thread drops the last reference.
    """

    memory: LockedMemory
    free: list[tuple[int, int]]
    returned: deque[tuple[int, int]]

    @classmethod
    def of(cls, nbytes: int) -> Self:
        return cls(_new_memory(nbytes), [(0, nbytes)], deque())

    def take(self, nbytes: int) -> Tensor | None:
        """Take a piece; ``None`` if no place is large enough."""
        self._collect()
        needed = round_up(nbytes)
        place = next((place for place, (start, end) in enumerate(self.free) if end - start >= needed), None)
        if place is None:
            return None
        start, end = self.free[place]
        self.free[place : place + 1] = [(start + needed, end)] if start + needed < end else []
        part = self.memory.part(start, nbytes)
        # The tensor's storage holds the array, which lives as long as any tensor or view that uses the memory.
        weakref.finalize(part, self.returned.append, (start, start + needed)).atexit = False
        return torch.frombuffer(part, dtype=torch.uint8)

    def _collect(self) -> None:
        """Merge returned pieces with their neighbors."""
        while self.returned:
            insort(self.free, self.returned.popleft())
        joined: list[tuple[int, int]] = []
        for start, end in self.free:
            if joined and joined[-1][1] == start:
                start = joined.pop()[0]
            joined.append((start, end))
        self.free[:] = joined


def _new_memory(nbytes: int) -> LockedMemory:
    return LockedMemory(mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def wait_for_device() -> None:
    """Wait for all running copies."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def round_up(nbytes: int) -> int:
    """Return the bytes that a piece of ``nbytes`` takes."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True, slots=True)
class _Offloaded:
    storage: UntypedStorage
    nbytes: int
    contents: Tensor | None


class HostOffload:
    """Host memory for what leaves the device. It grows to the most that was offloaded at a time."""

    def __init__(self) -> None:
        self._arenas: list[HostMemory] = []
        self._offloaded: list[_Offloaded] = []

    def offload(self, tensors: Iterable[Tensor]) -> None:
        """Copy the tensors' storages to the host and free them. Skips storages that are already offloaded."""
        storages = list(_filled(tensors))
        offloaded = []
        for storage, place in zip(storages, self._places(storages), strict=True):
            place.copy_(_bytes_of(storage), non_blocking=True)
            offloaded.append(_Offloaded(storage, storage.nbytes(), place))
        self._free(offloaded)

    def discard(self, tensors: Iterable[Tensor]) -> None:
        """Free the tensors' storages without saving them: ``restore`` fills them with zeros."""
        self._free([_Offloaded(storage, storage.nbytes(), None) for storage in _filled(tensors)])

    def restore(self) -> None:
        """Restore all storages' memory and contents."""
        for one in self._offloaded:
            one.storage.resize_(one.nbytes)
            if one.contents is None:
                _bytes_of(one.storage).zero_()
            else:
                _bytes_of(one.storage).copy_(one.contents, non_blocking=True)
        wait_for_device()  # the host memory may be overwritten afterwards
        self._offloaded = []
        for arena in self._arenas:
            arena.clear()

    def close(self) -> None:
        """Drop the memory and everything offloaded in it; see ``HostMemory.close``."""
        for arena in self._arenas:
            arena.close()
        self._arenas, self._offloaded = [], []

    def _free(self, offloaded: list[_Offloaded]) -> None:
        wait_for_device()
        for one in offloaded:
            one.storage.resize_(0)
        self._offloaded += offloaded

    def _places(self, storages: list[UntypedStorage]) -> Iterator[Tensor]:
        """Yield room in host memory for each storage."""
        left = sum(round_up(storage.nbytes()) for storage in storages)
        for storage in storages:
            needed = round_up(storage.nbytes())
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
