"""Interface of weight transports, which move weights from a trainer rank to an engine, and the buffer of a bucket."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from slime_like.interfaces import BucketMetadata, TensorEntry, WeightBucket
from slime_like.interfaces.weights import dtype_name
from slime_like.weights.checksums import as_bytes, copy_hashed

ALIGNMENT = 64
"""Alignment of every tensor's start, in bytes: a cache line, and a multiple of every element size."""


@dataclass(frozen=True, slots=True)
class TransportSettings:
    """Settings of a sender. Each transport uses the ones it needs.

    Attributes:
        address: interface that network transports listen on, and reach receivers by.
        directory: where the directory transport writes its files.
        timeout_s: bound on every wait for a receiver.
        delta: send only what changed since the last finished sync.
        stage: pipeline stage of the sending rank.
        gathers: this rank gathers the buckets of its stage.
        keep_nbytes: device buffers larger than this are freed with their bucket.
    """

    address: str = "127.0.0.1"
    directory: Path | None = None
    timeout_s: float = 300.0
    delta: bool = False
    stage: int = 0
    gathers: bool = True
    keep_nbytes: int = 288 << 20


class Sender(Protocol):
    """Sending end in a trainer rank, used from one thread. Errors are ``WeightSyncError``.

    Two buckets may be in flight: the sender gathers and writes one while receivers read the other.
    """

    def rendezvous(self) -> dict[str, Any]:
        """Return this sender's address for receivers, as plain values only, because it is sent by RPC."""

    def send(self, bucket: WeightBucket) -> BucketMetadata:
        """Make the bucket available to receivers without waiting for them. It stays available until ``release``."""

    def release(self, metadata: BucketMetadata) -> None:
        """Release a bucket after every receiver has finished it or failed.

        Raises:
            WeightSyncError: a receiver was not reached. The bucket is released anyway.
        """

    def rest(self) -> None:
        """Free device memory until the next sync. No bucket is in flight, and receivers have called ``rest``."""
        return

    def close(self) -> None:
        """Release everything. May be called twice; never waits for a receiver."""


class Receiver(Protocol):
    """Receiving end in an engine's worker. Errors are ``WeightSyncError``."""

    def receive(self, metadata: BucketMetadata) -> Iterator[tuple[str, Tensor]]:
        """Yield the bucket's tensors as zero-copy views, valid until the next ``receive`` or ``release``."""

    def rest(self) -> None:
        """Free device memory until the next sync. Received tensors are no longer read."""
        return

    def close(self) -> None:
        """Release everything. May be called twice."""
        return


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


BASE_LOST = "delta base lost"
"""Beginning of the error of a receiver of changes that lacks their base. It crosses processes as text."""


def is_base_lost(error: BaseException) -> bool:
    """Return whether a sync failed because a receiver lacks the base of the changes. A whole sync fixes this."""
    return BASE_LOST in str(error)


def gpu_uuid(index: int) -> str:
    """Return the GPU's name, which is the same in every process."""
    return str(torch.cuda.get_device_properties(index).uuid)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
