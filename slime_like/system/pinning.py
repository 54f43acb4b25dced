"""Host memory that CUDA has locked: copies between it and a GPU need no staging, and may run beside one another."""

import mmap
import weakref

import numpy as np
import torch
from torch import Tensor

_PORTABLE = 1
"""cudaHostRegisterPortable: for all of the process's devices."""


class LockedMemory:
    """A mapping's memory, locked if this process uses CUDA: until it is let go, or nothing looks into it any more.

    CUDA must never hold what is unmapped: the system gives the address out again, and the next lock there fails, or
    copies come from the old pages. A mapping has whole pages, so that no two locks share one.

    Raises:
        RuntimeError: CUDA refuses.
    """

    def __init__(self, mapping: mmap.mmap) -> None:
        # A view unlocks as it goes: the mapping itself would be unmapped before its finalizers run.
        self._view = np.frombuffer(mapping, np.uint8)
        self._unlock: weakref.finalize[[int], np.ndarray] | None = None
        if torch.cuda.is_initialized():
            address = self._view.ctypes.data
            _check("cudaHostRegister", torch.cuda.cudart().cudaHostRegister(address, self.nbytes, _PORTABLE))
            self._unlock = weakref.finalize(self._view, _unlock, address)
            self._unlock.atexit = False  # the process's end unlocks, too

    @property
    def nbytes(self) -> int:
        return self._view.nbytes

    def part(self, start: int, nbytes: int) -> np.ndarray:
        """(nbytes,) uint8; the memory stays mapped as long as it lives."""
        return self._view[start : start + nbytes]

    def tensor(self, start: int, nbytes: int) -> Tensor:
        """(nbytes,) uint8 with a storage of that size, as ``part``."""
        return torch.frombuffer(self._view, dtype=torch.uint8, count=nbytes, offset=start)

    def let_go(self) -> None:
        """Unlock it; no copy of a device may be under way. What looks into it stays valid."""
        if self._unlock is not None:
            self._unlock()


def _unlock(address: int) -> None:
    if torch.cuda.is_initialized():  # not in a fork, which has locked nothing
        _check("cudaHostUnregister", torch.cuda.cudart().cudaHostUnregister(address))


def _check(call: str, code: object) -> None:
    if number := int(code):  # type: ignore[call-overload]
        raise RuntimeError(
            f"{call}: CUDA error {number}; raise the limit of locked memory (docker: --ulimit memlock=-1)"
        )
