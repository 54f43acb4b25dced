"""Tensors in one flat byte buffer: where each one lies, how it gets in, and how it is seen again without a copy."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from slime_like.errors import WeightSyncError
from slime_like.interfaces import BucketFigures, TensorEntry, WeightBucket
from slime_like.weights.checksums import as_bytes, tensor_checksum
from slime_like.weights.hashed_copy import copy_hashed
from slime_like.weights.stopwatch import Stopwatch

ALIGNMENT = 64
"""Every tensor starts at a multiple of this: a cache line, and a multiple of every element size."""


def tensor_nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def bucket_nbytes(bucket: WeightBucket) -> int:
    """Bytes of the buffer that holds ``bucket``, alignment included."""
    return sum(_aligned(tensor_nbytes(tensor)) for _, tensor in bucket.tensors)


def figures_of(entries: Sequence[TensorEntry], hashing: Stopwatch) -> BucketFigures:
    """Return the figures of a bucket that travels whole."""
    return BucketFigures(sum(entry.nbytes for entry in entries), hash_s=hashing.seconds)


def place_tensors(bucket: WeightBucket) -> Iterator[tuple[str, Tensor, int]]:
    """Name, contiguous tensor and offset of everything in ``bucket``, in the order of the buffer.

    Raises:
        WeightSyncError: a name occurs twice.
    """
    _refuse_duplicates([name for name, _ in bucket.tensors])
    offset = 0
    for name, tensor in bucket.tensors:
        yield name, tensor.detach().contiguous(), offset
        offset += _aligned(tensor_nbytes(tensor))


def entry_of(name: str, tensor: Tensor, offset: int, hashing: Stopwatch) -> TensorEntry:
    """``tensor`` as it lies at ``offset``, with its checksum."""
    with hashing.running():
        checksum = tensor_checksum(tensor)
    return _described(name, tensor, offset, checksum)


def _described(name: str, tensor: Tensor, offset: int, checksum: int) -> TensorEntry:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return TensorEntry(name, dtype, tuple(tensor.shape), offset, tensor_nbytes(tensor), checksum)


def write_bucket(bucket: WeightBucket, buffer: Tensor, hashing: Stopwatch | None = None) -> tuple[TensorEntry, ...]:
    """Copy every tensor of ``bucket`` into ``buffer`` (uint8, 1-D) and describe it.

    The checksum is taken of the source tensor, so that it also guards the copy; ``hashing`` measures it.

    Raises:
        WeightSyncError: the buffer is too small, or a name occurs twice.
    """
    needed, hashing = bucket_nbytes(bucket), hashing or Stopwatch()
    if needed > buffer.numel():
        raise WeightSyncError(f"a bucket of {needed} bytes does not fit its buffer of {buffer.numel()} bytes")
    entries: list[TensorEntry] = []
    for name, tensor, offset in place_tensors(bucket):
        data = as_bytes(tensor)
        checksum = copy_hashed(data, buffer[offset : offset + data.numel()], hashing)
        entries.append(_described(name, tensor, offset, checksum))
    return tuple(entries)


def read_bucket(entries: Sequence[TensorEntry], buffer: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Views into ``buffer`` (uint8, 1-D), in the order of ``entries``.

    Raises:
        WeightSyncError: an entry contradicts itself or reaches beyond the buffer.
    """
    for entry in entries:
        dtype = entry_dtype(entry)
        if entry.nbytes != math.prod(entry.shape) * dtype.itemsize:
            raise WeightSyncError(f"tensor {entry.name}: {entry.nbytes} bytes cannot be {entry.shape} of {entry.dtype}")
        if entry.offset < 0 or entry.offset % dtype.itemsize or entry.offset + entry.nbytes > buffer.numel():
            raise WeightSyncError(
                f"tensor {entry.name}: bytes {entry.offset} to {entry.offset + entry.nbytes} do not lie in a bucket "
                f"of {buffer.numel()} bytes"
            )
        yield entry.name, buffer[entry.offset : entry.offset + entry.nbytes].view(dtype).view(entry.shape)


def entry_dtype(entry: TensorEntry) -> torch.dtype:
    dtype = getattr(torch, entry.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise WeightSyncError(f"tensor {entry.name}: {entry.dtype!r} is not a torch dtype")
    return dtype


def _refuse_duplicates(names: Sequence[str]) -> None:
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise WeightSyncError(f"a bucket names {', '.join(twice)} more than once")


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
