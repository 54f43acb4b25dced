"""Low-rank factors of transformers' linear layers and stacks of experts."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from backends.common.hugging_face.files import Shape
from backends.common.step.grouped_product import ALIGNMENT, grouped_linear
from backends.common.trainer.lora import Initial, merged
from backends.common.trainer.roles import ADDED, is_added
from backends.fsdp.names import Piece, pieces, stored_shapes
from backends.fsdp.parallel import joined, rows_of_rank, shard_of
from backends.fsdp.weights import export_buckets
from slime_like.config import LoraConfig, ModelConfig
from slime_like.errors import ConfigError
from slime_like.interfaces import WeightBucket
from slime_like.weights.adapter import factor_names, is_target


class Factors(nn.Module):
    """Float32 factors of one parameter, which FSDP gathers in ``model.dtype`` like every other parameter.

    A linear layer has A, (r, in), and B, (out, r). A stack of E experts with k matrices each has A, (E, k r, in), and
    B, (E, out, r), in the order of the stack's rows. Both stay 0 for a matrix that is not a target, because neither
    gets a gradient while the other is 0.

    Attributes:
        name: the module's name; checkpoints have ``name``.a and ``name``.b.
        weight: name of the parameter in checkpoints.
    """

    def __init__(self, settings: LoraConfig, name: str, weight: str, parameter: Tensor) -> None:
        super().__init__()
        self.name, self.weight, self._settings = name, weight, settings
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

    def parameters_by_name(self) -> dict[str, Tensor]:
        """Return A and B by their names in training checkpoints."""
        return {f"{self.name}.a": self.a, f"{self.name}.b": self.b}

    def pieces(self, name: str, values: Tensor, start: int = 0) -> list[Piece]:
        """List PEFT's tensors in ``values``, entries of parameter ``name`` from ``start`` on, or of its gradient."""
        every = pieces(self.weight, values, start)
        targets = [each for each in every if is_target(self._settings, each.name, tuple(each.view.shape))]
        return [Piece(factor_names(each.name)[name.endswith(".b")], each.start, each.view) for each in targets]

    def shapes(self) -> dict[str, Shape]:
        """Return PEFT's name and the shape of every whole factor."""
        whole = {name: torch.empty(each.shape, device="meta") for name, each in self.parameters_by_name().items()}
        every = [piece for name, values in whole.items() for piece in self.pieces(name, values)]
        return {piece.name: tuple(piece.view.shape) for piece in every}

    @torch.no_grad()
    def fill(self, source: Initial) -> None:
        """Fill this rank's rows from ``source``, which has PEFT's tensors."""
        for name, parameter in self.parameters_by_name().items():
            for piece in self.pieces(name, shard_of(parameter), rows_of_rank(parameter).start):
                if piece.view.numel():
                    piece.view.copy_(source.read(piece.name, 0, piece.start, len(piece.view)))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialize the factors so that their product is 0."""
        for parameter in self.parameters():
            shard_of(parameter).zero_()
        self.fill(Initial(self.shapes()))

    @torch.no_grad()
    def merge(self, rows: Tensor) -> Tensor:
        """Return this rank's rows of the weight plus its product, rounded once. Collective over the world."""
        a, b = (shard_of(each).to(rows.device) for each in (self.a, self.b))
        if rows.ndim == 2:
            a = joined(a, self.a.shape, a.dtype, rows.device)
        result = torch.empty_like(rows)
        for parts in zip(*(pieces(self.weight, each) for each in (result, rows, a, b)), strict=True):
            to, weight, of_a, of_b = (part.view for part in parts)
            to.copy_(merged(weight, of_a, of_b, of_b.new_ones(len(of_b), 1), self._settings.scale))
        return result


class _OfStacks(nn.ModuleDict):
    """Factors of a layer's stacks of experts, by parameter."""

    def reset_parameters(self) -> None:
        for factors in self.values():
            assert isinstance(factors, Factors)
            factors.reset_parameters()


def add_factors(settings: ModelConfig, model: Any) -> None:
    """Add factors to a ``LogprobModel`` and freeze everything else, in ``model.dtype``.

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
                model.factors[model.names[name]] = _attached(settings.lora, model, name, parameter)
    if not model.factors:
        raise ConfigError(f"model.lora.targets={list(settings.lora.targets)}: no matrix of the model; name others")


def _attached(settings: LoraConfig, model: Any, name: str, parameter: Tensor) -> Factors:
    path, _, leaf = name.rpartition(".")
    module = model.hugging_face.get_submodule(path)
    if isinstance(module, nn.Linear):
        module.added = Factors(settings, f"{path}.{ADDED}", model.names[name], parameter)
        module.register_forward_hook(lambda _, given, result: result + module.added(given[0]))
        return module.added
    if parameter.ndim < 3 or not hasattr(module, "has_gate"):
        raise ConfigError(
            f"model.lora.targets: {model.names[name]} is a matrix of a {type(module).__name__}, for which "
            "trainer.backend=fsdp has no factors; name other targets"
        )
    if ADDED not in module._modules:
        module.added = _OfStacks()
    module.added[leaf] = Factors(settings, f"{path}.{ADDED}.{leaf}", model.names[name], parameter)
    return module.added[leaf]


def export_factors(
    model: Any, rows: Callable[[str], Tensor], dtype: torch.dtype, bucket_bytes: int, device: torch.device
) -> Iterator[WeightBucket]:
    """Stream factors, or tensors of the same shapes such as gradients, by PEFT's names; see ``export_buckets``."""
    owners = {name: factors for factors in model.factors.values() for name in factors.parameters_by_name()}
    tensors = {name: tensor for name, tensor in model.parameters_by_name().items() if name in owners}
    return export_buckets(
        tensors, rows, lambda name, whole: owners[name].pieces(name, whole), dtype, bucket_bytes, device
    )


def adapter_shapes(model: Any) -> dict[str, Shape]:
    """Return PEFT's name and the shape of every factor."""
    return {name: shape for factors in model.factors.values() for name, shape in factors.shapes().items()}
