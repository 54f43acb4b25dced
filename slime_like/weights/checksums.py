"""A position-sensitive 64-bit hash of a tensor's bytes: the same number on every device, for every view of the bytes.

A tree of two levels, each XXH3-64 without a seed (https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md). The bytes
are cut into chunks of ``CHUNK_BYTES``, the last one shorter, and

    hash = XXH3(XXH3(chunk 0), XXH3(chunk 1), ..., number of bytes)      each number as 8 bytes, little-endian

XXH3 is sequential: the chunks are what lets an accelerator work on all of them at once, also on those of many tensors
(``xxh3.py``). On a CPU the
library xxhash hashes at twice the speed of a copy. The hash finds damage and mix-ups; it is no protection against
forged weights.

Where a tensor is copied, copying and hashing are one pass over memory: a block is hashed while the processor's cache
still has it. Seconds of hashing are measured apart from those of the copy.
"""

import time
from collections.abc import Sequence
from itertools import compress, islice

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
    return tensor_checksums([tensor])[0]


def tensor_checksums(tensors: Sequence[Tensor]) -> list[int]:
    """``tensor_checksum`` of each; those on an accelerator, one and the same, are hashed together."""
    data = [as_bytes(tensor) for tensor in tensors]
    on_device = [each.device.type != "cpu" for each in data]
    together = iter(_on_device(list(compress(data, on_device))))
    hashes = (next(together) if there else _on_host(each) for each, there in zip(data, on_device, strict=True))
    return [checksum_of_chunks(found, each.numel()) for found, each in zip(hashes, data, strict=True)]


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


def _on_device(data: Sequence[Tensor]) -> list[list[int]]:
    """The same of several, which waits for the device twice; what is less than a chunk is fetched."""
    if not data:
        return []
    counts = [each.numel() // CHUNK_BYTES for each in data]
    cuts = [count * CHUNK_BYTES for count in counts]
    whole = chunk_hashes([each[:cut].view(-1, CHUNK_BYTES) for each, cut in zip(data, cuts, strict=True)])
    hashes = iter(whole.cpu().numpy().view(np.uint64).tolist())
    rests = [each[cut:] for each, cut in zip(data, cuts, strict=True)]
    fetched = torch.cat(rests).cpu().split([len(rest) for rest in rests])
    return [[*islice(hashes, count), *_on_host(rest)] for count, rest in zip(counts, fetched, strict=True)]


def timed_checksum(tensor: Tensor) -> tuple[int, float]:
    """``tensor_checksum``, and the seconds it took."""
    started = time.perf_counter()
    return tensor_checksum(tensor), time.perf_counter() - started


def copy_hashed(
    sources: Sequence[Tensor], targets: Sequence[Tensor], of_targets: bool = False
) -> tuple[list[int], float]:
    """Copy each source into its target; give ``tensor_checksum`` of sources or targets, and the seconds of hashing.

    On return everything has been copied.

    Args:
        of_targets: hash what the copies have written, not what they read.
    """
    checksums: dict[int, int] = {}
    hash_s = 0.0
    apart: dict[int, Tensor] = {}
    for place, (source, target) in enumerate(zip(sources, targets, strict=True)):
        if _lie_alike(source, target):
            checksums[place], seconds = _copy_blocks(as_bytes(source), as_bytes(target), of_targets)
            hash_s += seconds
            continue
        apart[place] = target if of_targets else source
        # What is hashed on the device is hashed after the copy, and its hash waited for.
        target.copy_(source, non_blocking=apart[place].device.type != "cpu")
    started = time.perf_counter()
    checksums |= zip(apart, tensor_checksums(list(apart.values())), strict=True)
    hash_s += time.perf_counter() - started if apart else 0.0
    return [checksums[place] for place in range(len(checksums))], hash_s


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
