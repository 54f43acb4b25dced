"""Experts that the routers of a transformers model choose."""

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor


class Routers:
    """Choices in the last forward pass.

    Args:
        layers: indices of the layers with experts.
    """

    def __init__(self, model: Any, layers: range) -> None:
        self._chosen = [torch.empty(0)] * len(layers)
        for index, layer in enumerate(layers):
            router = model.get_submodule(f"model.layers.{layer}.mlp.gate")
            router.register_forward_hook(partial(self._keep, index))

    def chosen(self, rows: int) -> np.ndarray:
        """Return int16 ids (rows, columns, layers with experts, choices) for a pass over ``rows`` rows."""
        chosen = torch.stack(self._chosen, dim=1).to("cpu", torch.int16)
        return chosen.view(rows, -1, *chosen.shape[1:]).numpy()

    def _keep(self, index: int, router: Any, inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
        self._chosen[index] = output[2]  # after logits and weights
