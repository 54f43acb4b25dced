"""CUDA's table of locked host memory, on a machine without CUDA."""

from itertools import pairwise
from pathlib import Path

import pytest

_ALREADY_LOCKED, _NOT_LOCKED = 712, 713


class Locked:
    """As CUDA's runtime answers: codes for what is locked twice, or was not.

    Args:
        error: what every lock is refused with.

    Attributes:
        ranges: of locked memory, address to size.
        total: locks that were granted so far.
        late: ranges that were unlocked when their memory was unmapped already.
    """

    def __init__(self, error: int = 0) -> None:
        self.ranges: dict[int, int] = {}
        self.total = 0
        self.late: list[tuple[int, int]] = []
        self._error = error

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        assert flags == 1 and address % 4096 == 0 and _is_mapped(address, nbytes)
        if self._error:
            return self._error
        if any(
            address < start + _pages(size) and start < address + _pages(nbytes) for start, size in self.ranges.items()
        ):
            return _ALREADY_LOCKED
        self.ranges[address] = nbytes
        self.total += 1
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        if address not in self.ranges:
            return _NOT_LOCKED
        if not _is_mapped(address, nbytes := self.ranges.pop(address)):
            self.late.append((address, nbytes))
        return 0

    def use(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr("torch.cuda.is_initialized", lambda: True)
        patch.setattr("torch.cuda.cudart", lambda: self)


def _pages(nbytes: int) -> int:
    return -(-nbytes // 4096) * 4096


def _is_mapped(address: int, nbytes: int) -> bool:
    """Whether the whole range is."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = [tuple(int(end, 16) for end in line.split()[0].split("-")) for line in lines]
    touching = [span for span in spans if span[0] < address + nbytes and address < span[1]]
    gaps = any(before[1] != after[0] for before, after in pairwise(touching))
    return bool(touching) and not gaps and touching[0][0] <= address and address + nbytes <= touching[-1][1]
