"""Low-rank factors in an engine: received like weights, and applied to every request.

The base then stays as loaded, and updates bring only the factors.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backends.common.hugging_face.files import Adapter
from rollout.base import UpdateTarget
from rollout.ranks import common_checksums
from slime_like.config import ModelConfig
from slime_like.interfaces import BucketMetadata
from slime_like.weights.adapter import factor_shapes, module_ends
from slime_like.weights.expected_tensors import expected_tensors
from slime_like.weights.received import WeightReceiver

Initial = tuple[str | None, dict[str, tuple[int, ...]]]
"""Path of a PEFT adapter, or ``None``, and the names and shapes of all factors."""


class AdapterTarget(UpdateTarget):
    """The adapter of an engine. Its ranks keep the factors in ``WeightReceiver.kept`` until all have arrived.

    Attributes:
        settings: PEFT's settings of the adapter, in plain values.
    """

    def __init__(self, model: ModelConfig) -> None:
        lora = model.lora
        self._path = None if lora.path is None else str(lora.path)
        self.expected = factor_shapes(lora, expected_tensors(model.path))
        self.settings: dict[str, Any] = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none"}
        self.settings |= {"r": lora.rank, "lora_alpha": lora.alpha, "target_modules": module_ends(self.expected)}

    async def _receiver(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every rank's ``WeightReceiver``."""
        raise NotImplementedError

    async def _serve(self, initial: Initial | None) -> None:
        """Serve the ``taken`` factors on every rank."""
        raise NotImplementedError

    async def _serve_initial(self) -> None:
        await self._serve((self._path, self.expected))

    async def _begin_update(self) -> None:
        await self._receiver("begin_update")

    async def _update(self, bucket: BucketMetadata) -> None:
        await self._receiver("keep", bucket.to_wire())

    async def _received(self) -> tuple[dict[str, int], float]:
        return common_checksums(await self._receiver("received"))


def modules_with_factors(model: ModelConfig) -> list[str]:
    """Return the last names of the modules with factors."""
    return module_ends(factor_shapes(model.lora, expected_tensors(model.path)))


def taken(receiver: WeightReceiver, initial: Initial | None) -> dict[str, Tensor]:
    """Take the received factors out of ``kept``, or return the ``initial`` ones, which are 0 without an adapter.

    Raises:
        CheckpointError: the adapter has other factors.
    """
    if initial is None:
        kept, receiver.kept = receiver.kept, {}
        return kept
    path, shapes = initial[0], {name: tuple(shape) for name, shape in initial[1].items()}
    if path is None:
        return {name: torch.zeros(shape) for name, shape in shapes.items()}
    with Adapter(Path(path), shapes) as adapter:
        return {name: adapter.read_whole(name) for name in shapes}
