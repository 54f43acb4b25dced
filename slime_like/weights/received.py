"""Verification of received buckets: hash every tensor and compare it with the sender's checksum."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from slime_like.errors import WeightSyncError
from slime_like.interfaces import TensorEntry
from slime_like.weights.checksums import copy_hashed

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
