"""Low-rank factors of transformers' linear layers and stacks of experts."""

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backends.common.step.grouped_product import ALIGNMENT, grouped_linear
from backends.common.trainer.lora import merge_lora
from backends.common.trainer.state import ADDED, is_added
from backends.fsdp.names import TensorRows, pieces, stored_shapes
from backends.fsdp.parallel import gather_tensor, shard_of
from slime_like.config import LoraConfig, ModelConfig
from slime_like.errors import ConfigError
from slime_like.weights.adapter import factor_names, is_target


class FsdpLora(nn.Module):
    """Float32 factors of the parameter ``weight``, which FSDP gathers in ``model.dtype`` like every other parameter.

    A linear layer has A, (r, in), and B, (out, r). A stack of E experts with k matrices each has A, (E, k r, in), and
    B, (E, out, r), in the order of the stack's rows. Both stay 0 for a matrix that is not a target, because neither
    gets a gradient while the other is 0.
    """

    def __init__(self, settings: LoraConfig, weight: str, parameter: Tensor) -> None:
        super().__init__()
        self._weight, self._settings = weight, settings
        *experts, out, width = parameter.shape
        self._matrices = len(stored_shapes(weight, tuple(parameter.shape))) // math.prod(experts)
        rank, empty = settings.rank or 0, partial(parameter.new_empty, dtype=torch.float32)
        self.a = nn.Parameter(empty((*experts, self._matrices * rank, width)))
        self.b = nn.Parameter(empty((*experts, out, rank)))

    def forward(self, x: Tensor, ends: Tensor | None = None) -> Tensor:
        """Return the scaled product, (..., out), for (..., in) rows.

        Args:
            ends: (E,) end of each expert's rows, for a stack.
        """
        x = F.dropout(x, self._settings.dropout, training=torch.is_grad_enabled())  # scoring has no gradients
        if ends is None:
            return F.linear(F.linear(x, self.a) * self._settings.scale, self.b)
        every = zip(*(each.chunk(self._matrices, dim=1) for each in (self.a, self.b)), strict=True)
        return torch.cat([self._of_experts(x, ends, a, b) for a, b in every], dim=-1)

    def _of_experts(self, x: Tensor, ends: Tensor, a: Tensor, b: Tensor) -> Tensor:
        missing = -b.shape[-1] % (ALIGNMENT // x.itemsize)  # zeros up to a rank that the product accepts
        inner = grouped_linear(x, ends, F.pad(a, (0, 0, 0, missing)))
        return grouped_linear(inner * self._settings.scale, ends, F.pad(b, (0, missing)))

    def pieces(self, name: str, values: Tensor, start: int = 0) -> list[TensorRows]:
        """List PEFT's tensors in ``values``, entries of parameter ``name`` from ``start`` on, or of its gradient."""
        every = pieces(self._weight, values, start)
        targets = [each for each in every if is_target(self._settings, each.name, tuple(each.view.shape))]
        return [TensorRows(factor_names(each.name)[name.endswith(".b")], each.start, each.view) for each in targets]

    @torch.no_grad()
    def merge(self, rows: Tensor) -> Tensor:
        """Return this rank's rows of the weight plus its product, rounded once. Collective over the world."""
        a, b = (shard_of(each).to(rows.device) for each in (self.a, self.b))
        if rows.ndim == 2:
            a = gather_tensor(a, self.a.shape, a.dtype, rows.device)
        result = torch.empty_like(rows)
        for parts in zip(*(pieces(self._weight, each) for each in (result, rows, a, b)), strict=True):
            to, weight, of_a, of_b = (part.view for part in parts)
            to.copy_(merge_lora(weight, of_a, of_b, of_b.new_ones(len(of_b), 1), self._settings.scale))
        return result


def add_lora(settings: ModelConfig, model: Any) -> None:
    """Add factors to a ``FsdpModel`` and freeze everything else, in ``model.dtype``.

    Raises:
        ConfigError: a target is not a linear layer's or a stack's matrix, or there is none.
    """
    if not settings.lora.is_set:
        return
    for name, parameter in list(model.hugging_face.named_parameters()):
        if not is_added(name):
            parameter.requires_grad_(False)
            parameter.data = parameter.data.to(getattr(torch, settings.dtype))
            stored = stored_shapes(model.names[name], tuple(parameter.shape))
            if any(is_target(settings.lora, *each) for each in stored.items()):
                model.lora_weights[model.names[name]] = _attached(settings.lora, model, name, parameter)
    if not model.lora_weights:
        raise ConfigError(f"model.lora.targets={list(settings.lora.targets)}: no matrix of the model; name others")


def _attached(settings: LoraConfig, model: Any, name: str, parameter: Tensor) -> FsdpLora:
    path, _, leaf = name.rpartition(".")
    module = model.hugging_face.get_submodule(path)
    if isinstance(module, nn.Linear):
        module.added = FsdpLora(settings, model.names[name], parameter)
        module.register_forward_hook(lambda _, given, result: result + module.added(given[0]))
        return module.added
    if parameter.ndim < 3 or not hasattr(module, "has_gate") or module.is_transposed:
        raise ConfigError(
            f"model.lora.targets: {model.names[name]} is a matrix of a {type(module).__name__}, for which "
            "trainer.backend=fsdp has no factors; name other targets"
        )
    if ADDED not in module._modules:
        module.added = nn.ModuleDict()
    module.added[leaf] = FsdpLora(settings, model.names[name], parameter)
    return module.added[leaf]
