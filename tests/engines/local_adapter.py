"""``LocalTrainers`` with low-rank factors: Hugging Face's model with hooks, which computes base and product apart."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backends.common.trainer.lora import Initial, Trial
from slime_like.config import LoraConfig
from slime_like.interfaces import Manifest
from slime_like.weights.adapter import ADAPTER, factor_names, factor_shapes
from tests.engines.local_sync import LocalTrainers


class LocalAdapterTrainers(LocalTrainers):
    """Trainers that send factors. They start like training, with a product of 0."""

    def __init__(self, model: Path, directory: Path, lora: LoraConfig) -> None:
        super().__init__(model, directory)
        self._lora = lora
        self.shapes = factor_shapes(lora, {name: tuple(weight.shape) for name, weight in self.weights.items()})
        self.factors = self._own = _read(Initial(self.shapes))
        for name in self.weights:
            a, b = factor_names(name)
            if a in self.shapes:
                layer = self.model.get_submodule(name.removesuffix(".weight"))
                layer.register_forward_hook(partial(self._add, a, b))

    def train(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for factor in self.factors.values():
            factor += 0.03 * torch.randn(factor.shape, generator=generator)

    def exported(self) -> dict[str, Tensor]:
        return self.factors

    def begin_export(self) -> list[Manifest]:
        return [replace(part, updates=ADAPTER) for part in super().begin_export()]

    def perturb_adapter(self, size: float | None) -> list[None]:
        """Like ``TrainerBackend.perturb_adapter``."""
        if size is None:
            self.factors = self._own
        else:
            self.factors = _read(Trial(self.shapes, size / self._lora.scale))
        return [None]

    def _add(self, a: str, b: str, layer: Any, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        return output + self._lora.alpha / (self._lora.rank or 0) * (inputs[0] @ self.factors[a].T) @ self.factors[b].T


def _read(source: Initial) -> dict[str, Tensor]:
    return {name: source.read(name, 0, 0, shape[0]).clone() for name, shape in source.shapes.items()}
