"""How the bytes of a bucket get from a trainer rank into an engine's worker: one small interface, many carriers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from torch import Tensor

from slime_like.interfaces import BucketMetadata, WeightBucket


class Sender(Protocol):
    """Lives in a trainer rank. Errors are ``WeightSyncError``."""

    def rendezvous(self) -> dict[str, Any]:
        """What a receiver needs to find this sender: plain values only, they travel by RPC."""

    def send(self, bucket: WeightBucket) -> BucketMetadata:
        """Put the bucket where receivers can fetch it. Its bytes stay there until ``release``."""

    def release(self, metadata: BucketMetadata) -> None:
        """Every receiver is done with this bucket."""

    def close(self) -> None:
        """Give everything back. May be called twice."""


class Receiver(Protocol):
    """Lives in an engine's worker. Errors are ``WeightSyncError``."""

    def receive(self, metadata: BucketMetadata) -> Iterator[tuple[str, Tensor]]:
        """The bucket's tensors as zero-copy views, valid until the next ``receive`` and only before ``release``."""

    def close(self) -> None:
        """Give everything back. May be called twice."""
