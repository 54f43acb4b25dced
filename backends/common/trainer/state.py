"""Interface of a rank's weights and optimizer state: loading, saving, exporting and offloading."""

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor

from backends.common.checkpoint.writing import CheckpointWriter
from backends.common.hugging_face.files import Adapter
from backends.common.process.agreement import together
from backends.common.trainer.host_memory import HostCopies, HostOffload, HostPool, wait_for_device
from slime_like.config import ModelConfig
from slime_like.interfaces import WeightBucket, WeightExport
from slime_like.weights.expected_tensors import expected_factors

if TYPE_CHECKING:
    from backends.common.trainer.lora import Initial

ADDED = "added"
"""Name of a module that training adds: it is in no Hugging Face checkpoint of the model."""


def is_added(parameter: str) -> bool:
    """Return whether a parameter belongs to an added module."""
    return ADDED in parameter.split(".")


class StepOptimizer(Protocol):
    """The optimizer interface that a step uses."""

    @property
    def learning_rate(self) -> float:
        """Rate of the last update."""

    def gradient_norm(self) -> float:
        """Return the global norm of the finished gradients, before clipping. Collective."""

    def update(self, gradient_norm: float) -> None:
        """Clip by the measured norm and take one step at the schedule's next rate."""


class TrainerState(ABC):
    """One rank's shard of the weights and the optimizer state. All methods but ``weights`` are collective.

    The optimizer's part exists in a trainer that trains; ``load``, ``plan_save``, ``export_gradients``, ``offload`` and
    ``onload`` need it.

    Attributes:
        offloaded: holds the state while it is not on the device.
        constants: further tensors on the device that only training reads.
        save_copies: holds the state until it is written in the background.
        frozen: host memory with the weights of each frozen role, the weights, and whether they are all weights or only
            factors.
        activations: holds activations until backward.
    """

    def __init__(self) -> None:
        self.offloaded = HostOffload()
        self.constants: list[Tensor] = []
        self.save_copies = HostCopies()
        self.frozen: dict[str, tuple[HostCopies, list[Tensor], bool]] = {}
        self.activations = HostPool()

    def close(self) -> None:
        """Release all host memory, including offloaded state. A running save still reads its copies."""
        wait_for_device()
        for memory in (self.offloaded, self.save_copies, self.activations):
            memory.close()
        for copies, *_ in self.frozen.values():
            copies.close()

    @abstractmethod
    def weights(self) -> list[Tensor]:
        """Return this rank's part of every weight that a checkpoint holds, as the model's memory, not a copy."""

    def lora_weights(self) -> list[Tensor]:
        """Return this rank's part of every low-rank factor, as the model's memory. If there are some, the other weights
        never change."""
        return []

    def fill_lora_weights(self, source: Callable[[dict[str, tuple[int, ...]]], "Initial"]) -> None:
        """Fill all factors from ``source``, such as ``Trial``, which is given PEFT's names and whole shapes."""
        assert not self.lora_weights(), "a state with factors defines it"

    def load_adapter(self, model: ModelConfig, path: Path, device: torch.device) -> None:
        """Read the factors of a PEFT adapter."""
        what = f"loading {path}"
        with together(lambda: Adapter(path, expected_factors(model)), what, device) as adapter:
            together(lambda: self.fill_lora_weights(lambda _: cast(Any, adapter)), what, device)

    def _changing(self, base: bool) -> list[Tensor]:
        return self.weights() if base else self.lora_weights() or self.weights()

    def add_frozen(self, role: str, base: bool = False) -> None:
        """Copy the current weights for ``role``; of a model with factors, only these.

        Args:
            base: also copy weights that never change.
        """
        copies = self.frozen[role][0] if role in self.frozen else HostCopies()
        self.frozen[role] = copies, copies.of(self._changing(base)), base

    @torch.no_grad()
    def _fill(self, values: Sequence[Tensor], base: bool) -> None:
        # Queued after the device's other work; the values don't change before the next pass is done.
        for weight, value in zip(self._changing(base), values, strict=True):
            weight.copy_(value, non_blocking=True)

    @contextlib.contextmanager
    def snapshot(self, on_device: bool = False, base: bool = False) -> Iterator[None]:
        """Restore the current weights, bit for bit, after a block that may overwrite them; see ``add_frozen``."""
        weights = self._changing(base)
        saved = [each.detach().to(each.device if on_device else "cpu", copy=True) for each in weights]
        try:
            yield
        finally:
            self._fill(saved, base)

    @contextlib.contextmanager
    def without_lora(self) -> Iterator[None]:
        """Inside, all factors are 0, so the model computes what its base computes."""
        if not self.lora_weights():
            yield
            return
        with self.snapshot(on_device=True):
            self._fill([torch.zeros_like(each) for each in self.lora_weights()], base=False)
            yield

    @contextlib.contextmanager
    def swap_in(self, role: str) -> Iterator[None]:
        """Inside, the modules hold the weights of frozen ``role``. Their own weights stay on the device."""
        _, values, base = self.frozen[role]
        with self.snapshot(on_device=True, base=base):
            self._fill(values, base)
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
    def plan_save(self, directory: Path, copies: HostCopies | None = None) -> CheckpointWriter:
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
            self.offload_to_host(keep_weights)
            self.offloaded.offload(self.constants)
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """Move everything back to the device."""
        self.offloaded.restore()

    @abstractmethod
    def offload_to_host(self, keep_weights: bool) -> None:
        """Move the state to ``offloaded`` and drop gradients, on any device; see ``offload``."""
