"""Interface of weight transports, from a trainer rank into an engine's worker."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from slime_like.interfaces import BucketMetadata, WeightBucket


@dataclass(frozen=True, slots=True)
class TransportSettings:
    """Settings of a sender; every transport takes what it needs.

    Attributes:
        address: of the interface that network transports listen on, and reach receivers by.
        directory: where the directory transport puts its files.
        timeout_s: bound on every wait for a receiver.
        delta: send only what changed since the last finished sync.
        stage: pipeline stage of the sending rank.
        gathers: it is the rank of its stage that gathers the buckets.
        keep_nbytes: larger device buffers are freed with the bucket they were made for.
    """

    address: str = "127.0.0.1"
    directory: Path | None = None
    timeout_s: float = 300.0
    delta: bool = False
    stage: int = 0
    gathers: bool = True
    keep_nbytes: int = 288 << 20


class Sender(Protocol):
    """Lives in a trainer rank; used from one thread. Errors are ``WeightSyncError``.

    Two buckets may be in flight, so that one is gathered and written while receivers take the other.
    """

    def rendezvous(self) -> dict[str, Any]:
        """Address of this sender for receivers: plain values only, they travel by RPC."""

    def send(self, bucket: WeightBucket) -> BucketMetadata:
        """Put the bucket where receivers can fetch it, without waiting for them. It stays there until ``release``."""

    def release(self, metadata: BucketMetadata) -> None:
        """Release a bucket that every receiver has finished, or failed.

        Raises:
            WeightSyncError: a receiver was not reached; the bucket is released all the same.
        """

    def rest(self) -> None:
        """Free device memory until the next sync: no bucket is in flight, and receivers have rested."""

    def close(self) -> None:
        """Give everything back. May be called twice, and never waits for a receiver."""


class Receiver(Protocol):
    """Lives in an engine's worker. Errors are ``WeightSyncError``."""

    def receive(self, metadata: BucketMetadata) -> Iterator[tuple[str, Tensor]]:
        """The bucket's tensors as zero-copy views, valid until the next ``receive`` and only before ``release``."""

    def rest(self) -> None:
        """Free device memory until the next sync: what was received is no longer read."""

    def close(self) -> None:
        """Give everything back. May be called twice."""
