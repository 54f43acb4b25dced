"""Low-rank factors in an engine: received like weights, and applied to every request. The base stays as loaded."""

from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backends.common.hugging_face.files import Adapter
from rollout.base import UpdateTarget
from rollout.ranks import common_checksums
from slime_like.config import ModelConfig
from slime_like.interfaces import BucketMetadata
from slime_like.weights.adapter import module_ends
from slime_like.weights.expected_tensors import expected_factors
from slime_like.weights.received import WeightReceiver

Call = Callable[..., Awaitable[Any]]
Shapes = dict[str, tuple[int, ...]]


class AdapterTarget(UpdateTarget):
    """The adapter of an engine. Its ranks keep the factors in ``WeightReceiver.kept`` until all have arrived.

    Args:
        ranks: calls a method of every rank's ``WeightReceiver``, or a function (``function_of``).
        serve: this function's name. It gets PEFT's settings, and the arguments of ``taken``.
        flush: sets the version, and drops cached keys and values.
    """

    def __init__(self, model: ModelConfig, ranks: Call, serve: str, flush: Call) -> None:
        self.expected, lora = expected_factors(model), model.lora
        modules, path = module_ends(self.expected), None if lora.path is None else str(lora.path)
        settings: dict[str, Any] = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none"}
        settings |= {"r": lora.rank, "lora_alpha": lora.alpha, "target_modules": modules}
        self._ranks, self._flush = ranks, flush
        self._serve = partial(ranks, serve, settings, path, self.expected)

    async def _serve_initial(self) -> None:
        await self._serve()

    async def _begin_update(self) -> None:
        await self._ranks("begin_update")

    async def _update(self, bucket: BucketMetadata) -> None:
        await self._ranks("keep", bucket.to_wire())

    async def _received(self) -> tuple[dict[str, int], float]:
        return common_checksums(await self._ranks("received"))

    async def _finish_update(self, version: int) -> None:
        await self._serve()
        await self._flush(version)


def taken(receiver: WeightReceiver, path: str | None, shapes: Shapes) -> dict[str, Tensor]:
    """Take the received factors out of ``kept``. Before the first update, read those of the PEFT adapter ``path``;
    without one, they are 0."""
    kept, receiver.kept = receiver.kept, {}
    if kept or path is None:
        return kept or {name: torch.zeros(tuple(shape)) for name, shape in shapes.items()}
    with Adapter(Path(path), {name: tuple(shape) for name, shape in shapes.items()}) as adapter:
        return {name: adapter.read_whole(name) for name in shapes}
