"""Verification of received buckets: every tensor is hashed and compared with the sender's checksum."""

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
    """One update's tensors as they were received.

    All methods take a bucket's entries and its tensors, and raise ``WeightSyncError`` where one is not what was sent.

    Attributes:
        checksums: by name.
        hash_s: seconds spent on them.
    """

    checksums: dict[str, int] = field(default_factory=dict)
    hash_s: float = 0.0

    def copies(
        self, entries: Sequence[TensorEntry], tensors: Named, device: torch.device | str
    ) -> list[tuple[str, Tensor]]:
        """Copies of ``tensors`` on ``device``. What is hashed are the copies, all of them before any is handed out."""
        named = list(tensors)
        copies = [(name, torch.empty_like(tensor, device=device)) for name, tensor in named]
        self._copy(entries, named, [copy for _, copy in copies], of_targets=True)
        return copies

    def load(self, entries: Sequence[TensorEntry], tensors: Named, destination: Callable[[str], Tensor]) -> None:
        """Copy ``tensors`` to where they are served from.

        If it raises, damaged bytes may lie there: the update has failed, and nothing may be sampled until a whole one.
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
        """Note the hash that was ``found``, if it is the sender's."""
        if name != entry.name or found != entry.checksum:
            raise WeightSyncError(
                f"tensor {name} arrived damaged: hash {found:#018x}, sent {entry.checksum:#018x}", code="damaged-tensor"
            )
        self.checksums[name] = found
