"""What an engine's worker does with a bucket before it loads it: hash every tensor, and compare with the sender."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from slime_like.errors import WeightSyncError
from slime_like.interfaces import TensorEntry
from slime_like.weights.buckets import Stopwatch
from slime_like.weights.checksums import tensor_checksum


@dataclass(slots=True)
class Arrivals:
    """One update's tensors as they were received.

    Attributes:
        checksums: by name.
        hashing: seconds spent on them.
    """

    checksums: dict[str, int] = field(default_factory=dict)
    hashing: Stopwatch = field(default_factory=Stopwatch)

    def check(self, entries: Sequence[TensorEntry], tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Hash ``tensors``, the bucket of ``entries``.

        Raises:
            WeightSyncError: one is not what was sent. None of the bucket may then be loaded.
        """
        for entry, (name, tensor) in zip(entries, tensors, strict=True):
            with self.hashing.running():
                found = tensor_checksum(tensor)
            if name != entry.name or found != entry.checksum:
                raise WeightSyncError(f"tensor {name} arrived damaged: hash {found:#018x}, sent {entry.checksum:#018x}")
            self.checksums[name] = found
