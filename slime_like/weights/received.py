"""Receiving of weights in one rank of an engine. Every tensor's hash is compared with the sender's checksum."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from slime_like.errors import WeightSyncError
from slime_like.interfaces import BucketMetadata, TensorEntry
from slime_like.weights.checksums import copy_hashed
from slime_like.weights.transport import Receiver
from slime_like.weights.transports.registry import open_receiver

Named = Iterable[tuple[str, Tensor]]


@dataclass(slots=True)
class Arrivals:
    """The received tensors of one update.

    All methods take a bucket's entries and tensors, and raise ``WeightSyncError`` on a mismatch.

    Attributes:
        checksums: checksum by tensor name.
        hash_s: seconds spent hashing.
    """

    checksums: dict[str, int] = field(default_factory=dict)
    hash_s: float = 0.0

    def copies(
        self, entries: Sequence[TensorEntry], tensors: Named, device: torch.device | str
    ) -> list[tuple[str, Tensor]]:
        """Return copies of ``tensors`` on ``device``. Hashes all copies before it returns any."""
        named = list(tensors)
        copies = [(name, torch.empty_like(tensor, device=device)) for name, tensor in named]
        self._copy(entries, named, [copy for _, copy in copies], of_targets=True)
        return copies

    def load(self, entries: Sequence[TensorEntry], tensors: Named, destination: Callable[[str], Tensor]) -> None:
        """Copy ``tensors`` to their serving location.

        If this raises, that memory may hold damaged bytes: nothing may be sampled until a whole update succeeds.
        """
        named = list(tensors)
        self._copy(entries, named, [destination(name) for name, _ in named])

    def _copy(
        self,
        entries: Sequence[TensorEntry],
        named: Sequence[tuple[str, Tensor]],
        targets: Sequence[Tensor],
        of_targets: bool = False,
    ) -> None:
        found, hash_s = copy_hashed([tensor for _, tensor in named], targets, of_targets)
        self.hash_s += hash_s
        for entry, (name, _), checksum in zip(entries, named, found, strict=True):
            self.compare(entry, name, checksum)

    def compare(self, entry: TensorEntry, name: str, found: int) -> None:
        """Record the hash ``found`` if it matches the sender's."""
        if name != entry.name or found != entry.checksum:
            raise WeightSyncError(
                f"tensor {name} arrived damaged: hash {found:#018x}, sent {entry.checksum:#018x}", code="damaged-tensor"
            )
        self.checksums[name] = found


class WeightReceiver:
    """Receivers of all transports, and hashes of the tensors received in the open (or last) update.

    Args:
        worker: number of this rank in its engine.

    Attributes:
        kept: tensors of the open update that are used together, on the host.
    """

    def __init__(self, worker: int = 0) -> None:
        self._worker = worker
        self._receivers: dict[str, Receiver] = {}
        self._arrivals = Arrivals()
        self.kept: dict[str, Tensor] = {}

    def connect(self, transport: str, rendezvous: dict[str, Any]) -> None:
        """Join a transport, even if it was connected before. Waits for the trainers."""
        previous = self._receivers.pop(transport, None)
        if previous is not None:
            previous.close()
        self._receivers[transport] = open_receiver(transport, rendezvous, self._worker)

    def begin_update(self) -> None:
        self._arrivals, self.kept = Arrivals(), {}

    def copies(self, bucket: BucketMetadata, device: torch.device | str) -> list[tuple[str, Tensor]]:
        """Return copies of the bucket's tensors on ``device``. All are verified before any is returned."""
        return self._arrivals.copies(bucket.entries, self._receive(bucket), device)

    def keep(self, wire: dict[str, Any]) -> None:
        """Keep copies of a bucket's tensors in ``kept``. ``wire`` is its ``to_wire``."""
        self.kept |= self.copies(BucketMetadata.from_wire(wire), "cpu")

    def load(self, bucket: BucketMetadata, destination: Callable[[str], Tensor]) -> None:
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
        self.kept.clear()

    def _receive(self, bucket: BucketMetadata) -> Iterator[tuple[str, Tensor]]:
        return self._receivers[bucket.transport].receive(bucket)
