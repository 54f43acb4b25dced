"""Pack tensors into one flat byte buffer, and read them back from it without a copy."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from slime_like.errors import WeightSyncError
from slime_like.interfaces import TensorEntry, WeightBucket
from slime_like.weights.checksums import as_bytes, copy_hashed, timed_checksum

ALIGNMENT = 64
"""Alignment of every tensor's start, in bytes: a cache line, and a multiple of every element size."""


def bucket_nbytes(bucket: WeightBucket) -> int:
    """Return the size in bytes of the buffer that holds ``bucket``, including alignment."""
    return sum(_aligned(tensor.nbytes) for _, tensor in bucket.tensors)


def place_tensors(bucket: WeightBucket) -> Iterator[tuple[str, Tensor, int]]:
    """Yield the name, contiguous tensor and offset of each tensor in ``bucket``, in buffer order.

    Raises:
        WeightSyncError: a name occurs twice.
    """
    names = [name for name, _ in bucket.tensors]
    if twice := sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []:
        raise WeightSyncError(f"a bucket names {', '.join(twice)} more than once", code="repeated-tensor")
    offset = 0
    for name, tensor in bucket.tensors:
        yield name, tensor.detach().contiguous(), offset
        offset += _aligned(tensor.nbytes)


def describe(name: str, tensor: Tensor, offset: int, checksum: int) -> TensorEntry:
    """Return the entry for ``tensor`` at ``offset``."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorEntry(name, dtype, tuple(tensor.shape), offset, tensor.nbytes, checksum)


def describe_hashed(name: str, tensor: Tensor, offset: int) -> tuple[TensorEntry, float]:
    """Return the entry for ``tensor`` at ``offset``, and the seconds spent hashing it."""
    checksum, hash_s = timed_checksum(tensor)
    return describe(name, tensor, offset, checksum), hash_s


def write_bucket(bucket: WeightBucket, buffer: Tensor) -> tuple[tuple[TensorEntry, ...], float]:
    """Copy every tensor of ``bucket`` into ``buffer`` (uint8, 1-D); return the entries and the seconds spent hashing.

    The checksum is computed from the source tensor, so it also guards the copy.

    Raises:
        WeightSyncError: the buffer is too small, or a name occurs twice.
    """
    needed = bucket_nbytes(bucket)
    if needed > buffer.numel():
        raise WeightSyncError(
            f"a bucket of {needed} bytes does not fit its buffer of {buffer.numel()} bytes", code="buffer-too-small"
        )
    placed = list(place_tensors(bucket))
    targets = [buffer[offset : offset + tensor.nbytes] for _, tensor, offset in placed]
    checksums, hash_s = copy_hashed([as_bytes(tensor) for _, tensor, _ in placed], targets)
    return tuple(describe(*each, checksum) for each, checksum in zip(placed, checksums, strict=True)), hash_s


def read_bucket(entries: Sequence[TensorEntry], buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield views into ``buffer`` (uint8, 1-D), in the order of ``entries``.

    Raises:
        WeightSyncError: an entry contradicts itself or reaches beyond the buffer.
    """
    for entry in entries:
        dtype, end = getattr(torch, entry.dtype, None), entry.offset + entry.nbytes
        if not isinstance(dtype, torch.dtype):
            raise _bad_entry(entry, f"{entry.dtype!r} is not a torch dtype")
        if entry.nbytes != math.prod(entry.shape) * dtype.itemsize:
            raise _bad_entry(entry, f"{entry.nbytes} bytes cannot be {entry.shape} of {entry.dtype}")
        if entry.offset < 0 or entry.offset % dtype.itemsize or end > buffer.numel():
            raise _bad_entry(entry, f"bytes {entry.offset} to {end} are not inside a bucket of {buffer.numel()} bytes")
        yield entry.name, buffer[entry.offset : end].view(dtype).view(entry.shape)


def _bad_entry(entry: TensorEntry, problem: str) -> WeightSyncError:
    return WeightSyncError(problem, code="bad-entry", who=f"tensor {entry.name}")


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
