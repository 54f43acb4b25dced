"""Modules that a run adds to a model's when a backend builds it, such as an adapter's factors."""

from collections.abc import Iterator

from torch import nn

from slime_like.config import RunConfig
from slime_like.plugins.resolve import resolve

ADDED = "added"
"""Name of an added module. Its tensors are in no Hugging Face checkpoint of the model."""

ADDERS: dict[str, tuple[str, ...]] = {"megatron": (), "fsdp": ()}
"""By backend, import paths of functions of the configuration and a new model without weights, called in this order."""


def add_modules(backend: str, config: RunConfig, model: nn.Module) -> None:
    """Add what the run needs besides the model itself."""
    for path in ADDERS[backend]:
        resolve("added module", path, {})(config, model)


def own_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters of the model itself, by module name."""
    yield from ((name, each) for name, each in model.named_parameters() if ADDED not in name.split("."))
