"""A position-sensitive 64-bit hash of a tensor's bytes: the same number on every device, for every view of the bytes.

A tree of two levels, each XXH3-64 without a seed (https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md). The bytes
are cut into chunks of ``CHUNK_BYTES``, the last one shorter, and

    hash = XXH3(XXH3(chunk 0), XXH3(chunk 1), ..., number of bytes)      each number as 8 bytes, little-endian

XXH3 is sequential: the chunks are what lets an accelerator work on all of them at once (``xxh3.py``). On a CPU the
library xxhash hashes at twice the speed of a copy. The hash finds damage and mix-ups; it is no protection against
forged weights.

Where a tensor is copied, copying and hashing are one pass over memory: a block is hashed while the processor's cache
still has it. Seconds of hashing are measured apart from those of the copy.
"""

import time
from collections.abc import Sequence

import numpy as np
import torch
import xxhash
from torch import Tensor

from slime_like.weights.xxh3 import CHUNK_BYTES, chunk_hashes

_BLOCK_BYTES = 16 * CHUNK_BYTES
"""Fits a core's own cache twice. Larger blocks are hashed more slowly, smaller ones copied more slowly."""


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor in row-major order, uint8 and 1-D, without gradient; a view where it is contiguous."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def tensor_checksum(tensor: Tensor) -> int:
    """Hash of ``tensor``'s bytes in row-major order, in [0, 2**64).

    Shape and dtype do not enter: only bytes, their positions, and their number.
    """
    data = as_bytes(tensor)
    return checksum_of_chunks(_on_host(data) if data.device.type == "cpu" else _on_device(data), data.numel())


def checksum_of_chunks(hashes: Sequence[int], nbytes: int) -> int:
    """``tensor_checksum`` of ``nbytes`` bytes whose chunks have these hashes."""
    tree = np.array([*hashes, nbytes], dtype="<u8")
    return int(xxhash.xxh3_64_intdigest(tree.tobytes()))


def host_chunk_hashes(view: memoryview) -> list[int]:
    """A hash per chunk of the bytes."""
    digest = xxhash.xxh3_64_intdigest
    return [digest(view[start : start + CHUNK_BYTES]) for start in range(0, len(view), CHUNK_BYTES)]


def _on_host(data: Tensor) -> list[int]:
    """Hash (n,) uint8 on the host."""
    return host_chunk_hashes(memoryview(data.numpy().data))


def _on_device(data: Tensor) -> list[int]:
    """The same; what is less than a chunk is fetched."""
    whole = data.numel() // CHUNK_BYTES * CHUNK_BYTES
    hashes = chunk_hashes(data[:whole].view(-1, CHUNK_BYTES))
    return [*hashes.cpu().numpy().view(np.uint64).tolist(), *_on_host(data[whole:].cpu())]


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
