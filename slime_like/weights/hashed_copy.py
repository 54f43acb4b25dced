"""Copying and hashing in one pass over memory: a block is hashed while the processor's cache still has it.

Seconds of hashing are measured apart from those of the copy.
"""

import time

import numpy as np
from torch import Tensor

from slime_like.weights.checksums import as_bytes, checksum_of_chunks, host_chunk_hashes, tensor_checksum
from slime_like.weights.xxh3 import CHUNK_BYTES

_BLOCK_BYTES = 16 * CHUNK_BYTES
"""Fits a core's own cache twice. Larger blocks are hashed more slowly, smaller ones copied more slowly."""


def timed_checksum(tensor: Tensor) -> tuple[int, float]:
    """``tensor_checksum``, and the seconds it took."""
    started = time.perf_counter()
    return tensor_checksum(tensor), time.perf_counter() - started


def copy_hashed(source: Tensor, target: Tensor, of_target: bool = False) -> tuple[int, float]:
    """Copy ``source`` into ``target``; give ``tensor_checksum`` of one of them, and the seconds of hashing.

    Args:
        of_target: hash what the copy has written, not what it read.
    """
    if _lie_alike(source, target):
        return _copy_blocks(as_bytes(source), as_bytes(target), of_target)
    target.copy_(source)
    return timed_checksum(target if of_target else source)


def _lie_alike(source: Tensor, target: Tensor) -> bool:
    """Return whether the copy is a plain copy of bytes in host memory."""
    return (
        source.device.type == target.device.type == "cpu"
        and source.dtype == target.dtype
        and source.shape == target.shape
        and source.is_contiguous()
        and target.is_contiguous()
    )


def _copy_blocks(source: Tensor, target: Tensor, of_target: bool) -> tuple[int, float]:
    """Both (n,) uint8."""
    from_, into = source.numpy(), target.numpy()
    hashed = memoryview((into if of_target else from_).data)
    hashes: list[int] = []
    hash_s = 0.0
    for start in range(0, len(from_), _BLOCK_BYTES):
        block = slice(start, start + _BLOCK_BYTES)
        # By NumPy: torch would divide each block among its threads, whose caches are not this one's.
        np.copyto(into[block], from_[block])
        started = time.perf_counter()
        hashes += host_chunk_hashes(hashed[block])
        hash_s += time.perf_counter() - started
    return checksum_of_chunks(hashes, len(from_)), hash_s
