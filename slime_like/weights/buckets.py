"""Pack tensors into one flat byte buffer, and read them back from it without a copy."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from slime_like.interfaces import TensorEntry, WeightBucket
from slime_like.interfaces.weights import dtype_name
from slime_like.weights.checksums import as_bytes, copy_hashed

ALIGNMENT = 64
"""Alignment of every tensor's start, in bytes: a cache line, and a multiple of every element size."""


def bucket_nbytes(bucket: WeightBucket) -> int:
    """Return the size in bytes of the buffer that holds ``bucket``, including alignment."""
    return sum(_aligned(tensor.nbytes) for _, tensor in bucket.tensors)


def place_tensors(bucket: WeightBucket) -> Iterator[tuple[str, Tensor, int]]:
    """Yield the name, contiguous tensor and offset of each tensor in ``bucket``, in buffer order."""
    offset = 0
    for name, tensor in bucket.tensors:
        yield name, tensor.detach().contiguous(), offset
        offset += _aligned(tensor.nbytes)


def describe(name: str, tensor: Tensor, offset: int, checksum: int) -> TensorEntry:
    return TensorEntry(name, dtype_name(tensor.dtype), tuple(tensor.shape), offset, tensor.nbytes, checksum)


def write_bucket(bucket: WeightBucket, buffer: Tensor) -> tuple[tuple[TensorEntry, ...], float]:
    """Copy every tensor of ``bucket`` into ``buffer`` (uint8, 1-D); return the entries and the seconds spent hashing.

    The checksum is computed from the source tensor, so it also guards the copy.
    """
    placed = list(place_tensors(bucket))
    targets = [buffer[offset : offset + tensor.nbytes] for _, tensor, offset in placed]
    checksums, hash_s = copy_hashed([as_bytes(tensor) for _, tensor, _ in placed], targets)
    return tuple(describe(*each, checksum) for each, checksum in zip(placed, checksums, strict=True)), hash_s


def read_bucket(entries: Sequence[TensorEntry], buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield views into ``buffer`` (uint8, 1-D), in the order of ``entries``."""
    for entry in entries:
        data = buffer[entry.offset : entry.offset + entry.nbytes]
        yield entry.name, data.view(getattr(torch, entry.dtype)).view(entry.shape)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
