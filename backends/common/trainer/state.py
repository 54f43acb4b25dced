"""Interface of a rank's weights and optimizer state to a trainer: where they come from and where they go."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from backends.common.checkpoint.rank_writing import RankWriting
from backends.common.trainer.host_memory import HostCopies, HostPool, wait_for_device
from backends.common.trainer.parking import Parking
from slime_like.interfaces import WeightBucket


class TrainerState(ABC):
    """One rank's shard of the weights and of the optimizer's state. All methods but ``weights`` are collective.

    The optimizer's part exists in a trainer that trains; ``load``, ``plan_save``, ``export_gradients``, ``offload`` and
    ``onload`` need it.

    Attributes:
        parking: where the state is while it is not on the device.
        snapshot: where it waits to be written behind training's back.
        reference: where the frozen reference's weights are.
        activations: where activations wait for backward.
    """

    def __init__(self) -> None:
        self.parking = Parking()
        self.snapshot = HostCopies()
        self.reference = HostCopies()
        self.activations = HostPool()

    def close(self) -> None:
        """Let go of all host memory, with what is parked there. A save under way still reads its copies."""
        wait_for_device()
        for memory in (self.parking, self.snapshot, self.reference, self.activations):
            memory.close()

    @abstractmethod
    def weights(self) -> list[Tensor]:
        """This rank's part of every weight that a checkpoint holds, as the model's own memory."""

    def reference_copies(self) -> list[Tensor]:
        """The present weights as those of the reference, whose memory they take."""
        return self.reference.of(self.weights())

    @torch.no_grad()
    def _fill(self, values: Sequence[Tensor]) -> None:
        # Behind whatever else the device computes; the values are not changed before the next pass is done.
        for weight, value in zip(self.weights(), values, strict=True):
            weight.copy_(value, non_blocking=True)

    @contextlib.contextmanager
    def preserved(self) -> Iterator[None]:
        """Inside, the model's weights may be overwritten; afterwards the present ones are back, bit for bit."""
        saved = [weight.detach().to("cpu", copy=True) for weight in self.weights()]
        try:
            yield
        finally:
            self._fill(saved)

    @contextlib.contextmanager
    def replaced(self, frozen: Sequence[Tensor]) -> Iterator[None]:
        """Inside, the model computes with ``frozen`` in its own storage; afterwards its weights are back bit for bit.

        They stay on the device meanwhile.
        """
        policy = [weight.detach().clone() for weight in self.weights()]
        self._fill(frozen)
        try:
            yield
        finally:
            self._fill(policy)

    @abstractmethod
    def is_same_model(self, path: Path) -> bool:
        """True where the Hugging Face model of ``path`` computes as this one, with other weights."""

    @abstractmethod
    def load_hugging_face(self, path: Path) -> None:
        """Read the weights of a Hugging Face checkpoint."""

    @abstractmethod
    def load_weights(self, directory: Path) -> None:
        """Read the weights that ``plan_save`` or ``save_weights`` wrote, under any layout."""

    @abstractmethod
    def save_weights(self, directory: Path) -> None:
        """Write the weights alone."""

    @abstractmethod
    def load(self, directory: Path) -> None:
        """Read what a writer of ``plan_save`` wrote, under any layout."""

    @abstractmethod
    def plan_save(self, directory: Path, copies: HostCopies | None = None) -> RankWriting:
        """A writer of weights, optimizer, schedule and random state.

        Args:
            copies: where to keep the state as it is now: it may change before it is written.
        """

    @abstractmethod
    def export_weights(self, bucket_bytes: int) -> Iterator[WeightBucket]:
        """Hugging-Face-named buckets of at most ``bucket_bytes``."""

    @abstractmethod
    def export_gradients(self, bucket_bytes: int) -> Iterator[WeightBucket]:
        """Finished gradients, as ``export_weights`` gives weights."""

    @abstractmethod
    def export_hugging_face(self, directory: Path) -> None:
        """Write a complete Hugging Face checkpoint."""

    def offload(self, keep_weights: bool) -> None:
        """Free the device, apart from the weights if they are kept; gradients are dropped: a step must not be open."""
        if torch.cuda.is_available():
            self.park(keep_weights)
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """Move everything back to the device."""
        self.parking.restore()

    @abstractmethod
    def park(self, keep_weights: bool) -> None:
        """Move the state to ``parking`` and drop gradients, on any device; see ``offload``."""
