"""Interface of weight transports, which move weights from a trainer rank to an engine's worker."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from slime_like.interfaces import BucketMetadata, WeightBucket


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
