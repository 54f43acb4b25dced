"""Host memory for what comes from a device: pinned once, for copies of full speed, and used again."""

from collections.abc import Iterable

import torch
from torch import Tensor

_ALIGNMENT = 512


class HostMemory:
    """One piece of host memory, pinned where there is a GPU, and handed out from its beginning."""

    def __init__(self, nbytes: int) -> None:
        self._memory = torch.empty(nbytes, dtype=torch.uint8)
        self._used = 0
        self._is_pinned = torch.cuda.is_available() and nbytes > 0
        if self._is_pinned:
            # Registered, for torch's pinned allocator rounds every block up to a power of two.
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), nbytes, 0))

    @property
    def nbytes(self) -> int:
        return self._memory.nbytes

    @property
    def free(self) -> int:
        return self.nbytes - self._used

    def take(self, nbytes: int) -> Tensor:
        """(nbytes,) uint8 with a storage of that size: what is saved of it is no more than itself."""
        start = self._used
        self._used += rounded(nbytes)
        if nbytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._memory.numpy(), dtype=torch.uint8, count=nbytes, offset=start)

    def clear(self) -> None:
        """Hand it out from the beginning again."""
        self._used = 0

    def release(self) -> None:
        """Give it back to the system; what was taken must not be used any more."""
        if self._is_pinned:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr()))
            self._is_pinned = False
        self._memory, self._used = torch.empty(0, dtype=torch.uint8), 0


class HostCopies:
    """Copies of tensors in host memory of their size; the next ones take the same memory.

    A checkpoint's state, or a reference's weights, have one size throughout a run, so that memory is pinned once.
    """

    def __init__(self) -> None:
        self._memory = HostMemory(0)

    def of(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Contiguous copies of tensors on any device; those made before are overwritten."""
        sources = [tensor.detach() for tensor in tensors]
        needed = sum(rounded(source.nbytes) for source in sources)
        if needed > self._memory.nbytes:
            self._memory.release()
            self._memory = HostMemory(needed)
        self._memory.clear()
        copies = []
        for source in sources:
            copy = self._memory.take(source.nbytes).view(source.dtype).view(source.shape)
            copies.append(copy.copy_(source, non_blocking=True))
        wait_for_device()
        return copies


def wait_for_device() -> None:
    """Wait for all copies under way."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def rounded(nbytes: int) -> int:
    """Bytes that a piece of ``nbytes`` takes."""
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
