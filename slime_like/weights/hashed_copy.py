"""Copying and hashing in one pass over memory: a block is hashed while the processor's cache still has it."""

import numpy as np
from torch import Tensor

from slime_like.weights.checksums import as_bytes, checksum_of_chunks, host_chunk_hashes, tensor_checksum
from slime_like.weights.stopwatch import Stopwatch
from slime_like.weights.xxh3 import CHUNK_BYTES

_BLOCK_BYTES = 16 * CHUNK_BYTES
"""Fits a core's own cache twice. Larger blocks are hashed more slowly, smaller ones copied more slowly."""


def copy_hashed(source: Tensor, target: Tensor, hashing: Stopwatch, of_target: bool = False) -> int:
    """Copy ``source`` into ``target``, and give ``tensor_checksum`` of one of them.

    Args:
        hashing: measures what the hash takes, apart from the copy.
        of_target: hash what the copy has written, not what it read.
    """
    if _lie_alike(source, target):
        return _copy_blocks(as_bytes(source), as_bytes(target), hashing, of_target)
    target.copy_(source)
    with hashing.running():
        return tensor_checksum(target if of_target else source)


def _lie_alike(source: Tensor, target: Tensor) -> bool:
    """Return whether the copy is a plain copy of bytes in host memory."""
    return (
        source.device.type == target.device.type == "cpu"
        and source.dtype == target.dtype
        and source.shape == target.shape
        and source.is_contiguous()
        and target.is_contiguous()
    )


def _copy_blocks(source: Tensor, target: Tensor, hashing: Stopwatch, of_target: bool) -> int:
    """Both (n,) uint8."""
    from_, into = source.numpy(), target.numpy()
    hashed = memoryview((into if of_target else from_).data)
    hashes: list[int] = []
    for start in range(0, len(from_), _BLOCK_BYTES):
        block = slice(start, start + _BLOCK_BYTES)
        # By NumPy: torch would divide each block among its threads, whose caches are not this one's.
        np.copyto(into[block], from_[block])
        with hashing.running():
            hashes += host_chunk_hashes(hashed[block])
    return checksum_of_chunks(hashes, len(from_))
