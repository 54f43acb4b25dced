"""A position-sensitive 64-bit hash of a tensor's bytes: the same number on every device, for every view of the bytes.

The bytes are read as signed 32-bit little-endian words, padded with zeros to rows of ``ROW_WORDS``. Modulo 2**64,

    row[r] = sum over j of weight[j] * word[r, j]                    weight[j] = mix((j + 1) * STEP) | 1
    hash   = bytes * STEP + sum over r of mix(row[r] + (r + 1) * STEP)

where ``mix`` is the finalizer of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators,
OOPSLA 2014). A row is a multilinear hash: words of half the width keep a difference in the top bits from vanishing
modulo 2**64 (Lemire, Kaser: Strongly universal string hashing is fast, 2014). The hash finds damage and mix-ups. It
doesn't protect against forged weights.
"""

import time
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

ROW_WORDS = 4096
STEP = 0x9E3779B97F4A7C15

_ROW_BYTES = 4 * ROW_WORDS
_HOST_ROWS, _DEVICE_ROWS = 4, 2048
"""Rows multiplied together: products of 128 KiB and of 64 MiB. On the host, larger products fault in new pages each
time, which is eight times as slow."""


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor in row-major order, (n,) uint8 without gradient; a view if it is contiguous."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def tensor_checksum(tensor: Tensor) -> int:
    """Return the hash of ``tensor``'s bytes in row-major order, in [0, 2**64).

    The hash depends on the bytes, their positions and their number, but not on shape or dtype.
    """
    return tensor_checksums([tensor])[0]


def tensor_checksums(tensors: Sequence[Tensor]) -> list[int]:
    """Return each tensor's ``tensor_checksum``; waits for a device once."""
    data = [as_bytes(tensor) for tensor in tensors]
    rows = [_row_sums(each) for each in data]
    if not rows:
        return []
    fetched = torch.cat([each.to(rows[0].device) for each in rows]).cpu().numpy().view(np.uint64)
    starts = np.cumsum([len(each) for each in rows])[:-1]
    return [_hash(sums, each.numel()) for sums, each in zip(np.split(fetched, starts), data, strict=True)]


def _row_sums(data: Tensor) -> Tensor:
    """Return the weighted sums of the rows, (rows,) int64; two launches per batch of rows."""
    whole = data.numel() // _ROW_BYTES * _ROW_BYTES
    batch = _HOST_ROWS if data.device.type == "cpu" else _DEVICE_ROWS
    parts = [*_words(data[:whole]).split(batch)] if whole else []
    if whole < data.numel():
        parts.append(_words(torch.nn.functional.pad(data[whole:], (0, whole + _ROW_BYTES - data.numel()))))
    sums = [(part * _weights(data.device)).sum(dim=1) for part in parts]
    return torch.cat(sums) if sums else data.new_empty(0, dtype=torch.int64)


def _words(data: Tensor) -> Tensor:
    """View whole rows of bytes as (rows, ROW_WORDS) int32; a copy if they are not aligned."""
    if data.data_ptr() % 4 or data.storage_offset() % 4:
        data = data.clone()
    return data.view(torch.int32).view(-1, ROW_WORDS)


def _hash(sums: np.ndarray, nbytes: int) -> int:
    steps = np.arange(1, len(sums) + 1, dtype=np.uint64) * np.uint64(STEP)
    return (int(_mixed(sums + steps).sum(dtype=np.uint64)) + nbytes * STEP) % (1 << 64)


@cache
def _weights(device: torch.device) -> Tensor:
    steps = np.arange(1, ROW_WORDS + 1, dtype=np.uint64) * np.uint64(STEP)
    return torch.from_numpy((_mixed(steps) | np.uint64(1)).view(np.int64)).to(device)


def _mixed(values: np.ndarray) -> np.ndarray:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def timed_checksum(tensor: Tensor) -> tuple[int, float]:
    started = time.perf_counter()
    return tensor_checksum(tensor), time.perf_counter() - started


def copy_hashed(
    sources: Sequence[Tensor], targets: Sequence[Tensor], of_targets: bool = False
) -> tuple[list[int], float]:
    """Copy each source into its target; return the ``tensor_checksum`` of sources or targets, and the seconds it took.

    All copies have finished when this returns.

    Args:
        of_targets: hash the written copies instead of the sources.
    """
    hashed = targets if of_targets else sources
    for source, target, counted in zip(sources, targets, hashed, strict=True):
        # The hash on the device runs after the copy, and we wait for the hash.
        target.copy_(source, non_blocking=counted.device.type != "cpu")
    started = time.perf_counter()
    return tensor_checksums(hashed), time.perf_counter() - started
