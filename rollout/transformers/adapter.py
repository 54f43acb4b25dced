"""Low-rank factors in a transformers model, applied by hooks on its linear layers."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from rollout.adapter import AdapterTarget, Initial, taken
from slime_like.config import ModelConfig
from slime_like.errors import WeightSyncError
from slime_like.weights.adapter import PREFIX
from slime_like.weights.received import WeightReceiver


class TransformersAdapter(AdapterTarget):
    """The adapter of a transformers engine, whose loaded model ``module`` returns.

    Args:
        finish: see ``UpdateTarget._finish_update``.
    """

    def __init__(
        self,
        model: ModelConfig,
        receiver: WeightReceiver,
        module: Callable[[], nn.Module],
        finish: Callable[[int], Awaitable[None]],
    ) -> None:
        super().__init__(model)
        self._scale, self._hooks = model.lora.scale, list[Any]()
        self._own, self._module, self._finish = receiver, module, finish

    async def _receiver(self, method: str, *arguments: Any) -> list[Any]:
        return [await asyncio.to_thread(getattr(self._own, method), *arguments)]

    async def _serve(self, initial: Initial | None) -> None:
        """Replace the hooks.

        Raises:
            WeightSyncError: a target is not a linear layer.
        """
        while self._hooks:
            self._hooks.pop().remove()
        factors, modules = taken(self._own, initial), dict(self._module().named_modules())
        for name in (name for name in factors if ".lora_A." in name):
            stem = name.partition(".lora_A.")[0]
            layer = modules.get(stem.removeprefix(PREFIX))
            if not isinstance(layer, nn.Linear):
                problem = f"the transformers model has no linear layer for the factors of {stem}"
                raise WeightSyncError(problem, code="unknown-tensor", remedy="use model.lora.sync=merged")
            a, b = (factors[each].to(layer.weight) for each in (name, f"{stem}.lora_B.weight"))
            self._hooks.append(layer.register_forward_hook(_product(a, b, self._scale)))

    async def _finish_update(self, version: int) -> None:
        await self._serve(None)
        await self._finish(version)


def _product(a: Tensor, b: Tensor, scale: float) -> Callable[[nn.Module, tuple[Tensor], Tensor], Tensor]:
    """Return a hook that adds the product of A, (r, in), and B, (out, r)."""
    return lambda _, inputs, output: output + scale * F.linear(F.linear(inputs[0], a), b)
