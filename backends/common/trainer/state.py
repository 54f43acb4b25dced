"""Interface of a rank's weights and optimizer state: loading, saving, exporting and offloading."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from backends.common.checkpoint.rank_writing import RankWriting
from backends.common.trainer.host_memory import HostCopies, HostPool, wait_for_device
from backends.common.trainer.parking import Parking
from slime_like.interfaces import WeightBucket, WeightExport


class TrainerState(ABC):
    """One rank's shard of the weights and the optimizer state. All methods but ``weights`` are collective.

    The optimizer's part exists in a trainer that trains; ``load``, ``plan_save``, ``export_gradients``, ``offload`` and
    ``onload`` need it.

    Attributes:
        parking: holds the state while it is not on the device.
        snapshot: holds the state until it is written in the background.
        frozen: host memory with the weights of each frozen role, and the weights.
        activations: holds activations until backward.
    """

    def __init__(self) -> None:
        self.parking = Parking()
        self.snapshot = HostCopies()
        self.frozen: dict[str, tuple[HostCopies, list[Tensor]]] = {}
        self.activations = HostPool()

    def close(self) -> None:
        """Release all host memory, including parked state. A running save still reads its copies."""
        wait_for_device()
        for memory in (self.parking, self.snapshot, self.activations):
            memory.close()
        for copies, _ in self.frozen.values():
            copies.close()

    @abstractmethod
    def weights(self) -> list[Tensor]:
        """Return this rank's part of every weight that a checkpoint holds, as the model's memory, not a copy."""

    def freeze(self, role: str) -> None:
        """Copy the current weights for ``role``."""
        copies, _ = self.frozen.get(role, (HostCopies(), []))
        self.frozen[role] = copies, copies.of(self.weights())

    @torch.no_grad()
    def _fill(self, values: Sequence[Tensor]) -> None:
        # Queued after the device's other work; the values don't change before the next pass is done.
        for weight, value in zip(self.weights(), values, strict=True):
            weight.copy_(value, non_blocking=True)

    @contextlib.contextmanager
    def preserved(self, on_device: bool = False) -> Iterator[None]:
        """Restore the current weights, bit for bit, after a block that may overwrite them."""
        saved = [each.detach().to(each.device if on_device else "cpu", copy=True) for each in self.weights()]
        try:
            yield
        finally:
            self._fill(saved)

    @contextlib.contextmanager
    def replaced(self, role: str) -> Iterator[None]:
        """Inside, the modules hold the weights of frozen ``role``. Their own weights stay on the device."""
        with self.preserved(on_device=True):
            self._fill(self.frozen[role][1])
            yield

    @abstractmethod
    def is_same_model(self, path: Path) -> bool:
        """Return whether the Hugging Face model in ``path`` computes like this one, except for the weights."""

    @abstractmethod
    def load_hugging_face(self, path: Path) -> None:
        """Read the weights of a Hugging Face checkpoint."""

    @abstractmethod
    def load_weights(self, directory: Path) -> None:
        """Read weights written by ``plan_save`` or ``save_weights``, in any layout."""

    @abstractmethod
    def save_weights(self, directory: Path) -> None:
        """Write only the weights."""

    @abstractmethod
    def load(self, directory: Path) -> None:
        """Read what a writer from ``plan_save`` wrote, in any layout."""

    @abstractmethod
    def plan_save(self, directory: Path, copies: HostCopies | None = None) -> RankWriting:
        """Return a writer of weights, optimizer, schedule and random state.

        Args:
            copies: memory for a copy of the current state, which may change before it is written.
        """

    @abstractmethod
    def export_weights(self, bucket_bytes: int) -> WeightExport:
        """Export buckets with Hugging Face names, each at most ``bucket_bytes``."""

    @abstractmethod
    def export_gradients(self, bucket_bytes: int) -> Iterator[WeightBucket]:
        """Yield finished gradients, like the buckets of ``export_weights``."""

    @abstractmethod
    def export_hugging_face(self, directory: Path) -> None:
        """Write a complete Hugging Face checkpoint."""

    def offload(self, keep_weights: bool) -> None:
        """Free the device, except for kept weights. Gradients are dropped, so no step may be open."""
        if torch.cuda.is_available():
            self.park(keep_weights)
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """Move everything back to the device."""
        self.parking.restore()

    @abstractmethod
    def park(self, keep_weights: bool) -> None:
        """Move the state to ``parking`` and drop gradients, on any device; see ``offload``."""
