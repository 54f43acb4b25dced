"""Tensors in one flat byte buffer: where each one lies, how it gets in, and how it is seen again without a copy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from slime_like.errors import WeightSyncError
from slime_like.interfaces import TensorEntry, WeightBucket
from slime_like.weights.checksums import tensor_checksum

ALIGNMENT = 64
"""Every tensor starts at a multiple of this: a cache line, and a multiple of every element size."""


def tensor_nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def bucket_nbytes(bucket: WeightBucket) -> int:
    """Bytes of the buffer that holds ``bucket``, alignment included."""
    return sum(_aligned(tensor_nbytes(tensor)) for _, tensor in bucket.tensors)


def write_bucket(bucket: WeightBucket, buffer: Tensor) -> tuple[TensorEntry, ...]:
    """Copy every tensor of ``bucket`` into ``buffer`` (uint8, 1-D) and describe it.

    The checksum is taken of the source tensor, so that it also guards the copy.

    Raises:
        WeightSyncError: the buffer is too small, or a name occurs twice.
    """
    needed = bucket_nbytes(bucket)
    if needed > buffer.numel():
        raise WeightSyncError(f"a bucket of {needed} bytes does not fit its buffer of {buffer.numel()} bytes")
    entries: list[TensorEntry] = []
    offset = 0
    for name, tensor in bucket.tensors:
        entries.append(_write_tensor(name, tensor.detach(), buffer, offset))
        offset += _aligned(entries[-1].nbytes)
    _refuse_duplicates(entries)
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


def _write_tensor(name: str, tensor: Tensor, buffer: Tensor, offset: int) -> TensorEntry:
    tensor = tensor.contiguous()
    nbytes = tensor_nbytes(tensor)
    buffer[offset : offset + nbytes].copy_(tensor.reshape(-1).view(torch.uint8))
    return TensorEntry(
        name=name,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        offset=offset,
        nbytes=nbytes,
        checksum=tensor_checksum(tensor),
    )


def _refuse_duplicates(entries: Sequence[TensorEntry]) -> None:
    names = [entry.name for entry in entries]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise WeightSyncError(f"a bucket names {', '.join(twice)} more than once")


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
