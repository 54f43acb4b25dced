"""Host memory locked by CUDA. Copies between it and a GPU need no staging and can overlap."""

import mmap
import weakref

import numpy as np
import torch
from torch import Tensor

_PORTABLE = 1
"""cudaHostRegisterPortable: locked for all devices of the process."""


class LockedMemory:
    """Memory of a mapping, locked if this process uses CUDA, until ``let_go`` or until no view of it is left.

    Memory must be unlocked before it is unmapped. Otherwise the system reuses the address, and the next lock there
    fails, or copies read the old pages. A mapping has whole pages, so no two locks share one. Raises ``RuntimeError``
    if CUDA cannot lock the memory.
    """

    def __init__(self, mapping: mmap.mmap) -> None:
        # The view unlocks when it is freed. Finalizers of the mapping would run after it is unmapped.
        self._view = np.frombuffer(mapping, np.uint8)
        self._unlock: weakref.finalize[[int], np.ndarray] | None = None
        if torch.cuda.is_initialized():
            address = self._view.ctypes.data
            _check("cudaHostRegister", torch.cuda.cudart().cudaHostRegister(address, self.nbytes, _PORTABLE))
            self._unlock = weakref.finalize(self._view, _unlock, address)
            self._unlock.atexit = False  # the end of the process unlocks, too

    @property
    def nbytes(self) -> int:
        return self._view.nbytes

    def part(self, start: int, nbytes: int) -> np.ndarray:
        """Return a (nbytes,) uint8 view, which keeps the memory mapped."""
        return self._view[start : start + nbytes]

    def tensor(self, start: int, nbytes: int) -> Tensor:
        """Return a (nbytes,) uint8 view as a tensor whose storage has that size."""
        return torch.frombuffer(self._view, dtype=torch.uint8, count=nbytes, offset=start)

    def let_go(self) -> None:
        """Unlock the memory while no device copies. Views stay valid."""
        if self._unlock is not None:
            self._unlock()


def _unlock(address: int) -> None:
    if torch.cuda.is_initialized():  # a fork has locked nothing
        _check("cudaHostUnregister", torch.cuda.cudart().cudaHostUnregister(address))


def _check(call: str, code: object) -> None:
    if number := int(code):  # type: ignore[call-overload]
        remedy = "raise the limit of locked memory (docker: --ulimit memlock=-1)"
        raise RuntimeError(f"{call}: CUDA error {number}; {remedy}")
