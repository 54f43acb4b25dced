"""Experts that the routers of a transformers model choose."""

from typing import Any

import numpy as np
import torch
from torch import Tensor


class Routers:
    """Choices of the routers in ``layers``, by layer, in the passes since the last ``take``."""

    def __init__(self, model: Any, layers: range) -> None:
        self._chosen: list[list[Tensor]] = [[] for _ in layers]
        for layer, chosen in zip(layers, self._chosen, strict=True):
            mlp = model.get_submodule(f"model.layers.{layer}.mlp")
            router = mlp.router if hasattr(mlp, "router") else mlp.gate
            router.register_forward_hook(lambda _, __, output, kept=chosen: kept.append(output[2]))

    def take(self, rows: int) -> np.ndarray:
        """Return int16 ids (rows, columns, layers, choices) of passes with ``rows`` rows in total."""
        chosen = torch.stack([torch.cat(parts) for parts in self._chosen], dim=1).to("cpu", torch.int16)
        for parts in self._chosen:
            parts.clear()
        return chosen.view(rows, -1, *chosen.shape[1:]).numpy()
