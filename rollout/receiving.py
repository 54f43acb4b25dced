"""Receiving of weights in one rank of an engine."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from slime_like.interfaces import BucketMetadata
from slime_like.weights.received import Arrivals
from slime_like.weights.transport import Receiver
from slime_like.weights.transports.registry import open_receiver


class WeightReceiver:
    """Receivers of all transports, and hashes of the tensors received in the open (or last) update.

    Args:
        worker: number of this rank in its engine.
    """

    def __init__(self, worker: int = 0) -> None:
        self._worker = worker
        self._receivers: dict[str, Receiver] = {}
        self._arrivals = Arrivals()

    def connect(self, transport: str, rendezvous: dict[str, Any]) -> None:
        """Join a transport, even if it was connected before. Waits for the trainers."""
        previous = self._receivers.pop(transport, None)
        if previous is not None:
            previous.close()
        self._receivers[transport] = open_receiver(transport, rendezvous, self._worker)

    def begin_update(self) -> None:
        self._arrivals = Arrivals()

    def copies(self, bucket: BucketMetadata, device: torch.device | str) -> list[tuple[str, Tensor]]:
        """Return copies of the bucket's tensors on ``device``. All are verified before any is returned."""
        return self._arrivals.copies(bucket.entries, self._receive(bucket), device)

    def load(self, bucket: BucketMetadata, destination: Callable[[str], Tensor]) -> None:
        """Copy the bucket's tensors to their serving location, and verify them."""
        self._arrivals.load(bucket.entries, self._receive(bucket), destination)

    def received(self) -> tuple[dict[str, int], float]:
        """Return the hashes of the whole update, and the seconds spent hashing. Receivers then rest."""
        for receiver in self._receivers.values():
            receiver.rest()
        return self._arrivals.checksums, self._arrivals.hash_s

    def close(self) -> None:
        for receiver in self._receivers.values():
            receiver.close()
        self._receivers.clear()

    def _receive(self, bucket: BucketMetadata) -> Iterator[tuple[str, Tensor]]:
        return self._receivers[bucket.transport].receive(bucket)
