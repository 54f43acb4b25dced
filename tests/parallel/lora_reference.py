"""Low-rank factors written by hand on the float64 reference: every weight is W + (alpha / r) B A."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils import parametrize

from slime_like.config import AlgorithmConfig, LoraConfig
from tests.parallel.reference import Reference

_MATRICES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass(frozen=True)
class _Site:
    """A module's parameter, and the names of its Hugging Face matrices, by expert."""

    module: nn.Module
    name: str
    matrices: list[list[str]]


class _Weight(nn.Module):
    def __init__(self, pairs: list[list[tuple[Tensor, Tensor]]], scale: float) -> None:
        super().__init__()
        self._pairs, self._scale = pairs, scale

    def forward(self, weight: Tensor) -> Tensor:
        products = [torch.cat([b @ a for a, b in matrices]) for matrices in self._pairs]
        return weight + self._scale * (torch.stack(products) if weight.ndim == 3 else products[0])


class LoraReference(Reference):
    """The reference with random factors, both of them non-zero, of every target.

    Attributes:
        factors: leaf tensors by PEFT's names, in float64 with values that float32 can hold.
        base: the frozen weights by transformers' names.
    """

    def __init__(self, checkpoint: Path, algorithm: AlgorithmConfig, settings: LoraConfig, seed: int = 0) -> None:
        super().__init__(checkpoint, algorithm)
        self.model.requires_grad_(False)
        self.base = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        self.factors: dict[str, Tensor] = {}
        self._generator = torch.Generator().manual_seed(seed)
        for site in list(_sites(self.model)):
            shape = getattr(site.module, site.name).shape
            rows = shape[-2] // len(site.matrices[0])
            pairs = [[self._pair(name, rows, shape[-1], settings) for name in names] for names in site.matrices]
            parametrize.register_parametrization(site.module, site.name, _Weight(pairs, settings.scale))

    def _pair(self, name: str, rows: int, columns: int, settings: LoraConfig) -> tuple[Tensor, Tensor]:
        rank = settings.rank or 0
        if not any(target in ("all-linear", name.rpartition(".")[2]) for target in settings.targets):
            return torch.zeros(rank, columns).double(), torch.zeros(rows, rank).double()
        made = []
        for letter, shape in (("A", (rank, columns)), ("B", (rows, rank))):
            values = 0.1 * torch.randn(shape, generator=self._generator)
            leaf = values.double().requires_grad_()
            self.factors[f"base_model.model.{name}.lora_{letter}.weight"] = leaf
            made.append(leaf)
        return made[0], made[1]

    def step(self, *arguments: Any) -> Any:
        for leaf in self.factors.values():
            leaf.grad = None
        found = super().step(*arguments)
        found.gradients = {name: leaf.grad for name, leaf in self.factors.items()}
        return found

    def adamw(self, arguments: tuple[Any, ...], steps: int, clip: float, lr: float, eps: float) -> dict[str, Tensor]:
        """Return the factors after updates by torch's AdamW, and leave ``factors`` unchanged."""
        initial = {name: leaf.detach().clone() for name, leaf in self.factors.items()}
        optimizer = torch.optim.AdamW(list(self.factors.values()), lr=lr, betas=(0.9, 0.95), eps=eps, weight_decay=0.1)
        for _ in range(steps):
            self.step(*arguments)
            torch.nn.utils.clip_grad_norm_(self.factors.values(), clip)
            optimizer.step()
        updated = {name: leaf.detach().clone() for name, leaf in self.factors.items()}
        with torch.no_grad():
            for name, leaf in self.factors.items():
                leaf.copy_(initial[name])
        return updated

    def save(self, directory: Path) -> Path:
        """Write the factors' values as PEFT does."""
        directory.mkdir()
        save_file(
            {name: leaf.detach().float() for name, leaf in self.factors.items()},
            directory / "adapter_model.safetensors",
        )
        return directory


def _sites(model: Any) -> Iterator[_Site]:
    """Yield the parameters of all layers that have matrices other than the router's."""
    for path, module in model.named_modules():
        if re.match(r"model\.layers\.\d+\.", path) is None:
            continue
        if isinstance(module, nn.Linear):
            yield _Site(module, "weight", [[path]])
        elif path.endswith(".experts"):
            for kind, names in _MATRICES.items():
                experts = range(getattr(module, kind).shape[0])
                yield _Site(module, kind, [[f"{path}.{expert}.{name}" for name in names] for expert in experts])
