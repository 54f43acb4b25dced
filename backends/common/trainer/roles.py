"""What a role adds to a model's modules and minimizes, by import path: an adapter or a critic needs one line here."""

from collections.abc import Callable
from typing import Any

from torch import nn

from slime_like.config import RunConfig
from slime_like.plugins.resolve import resolve

OBJECTIVES = {"logprob": "backends.common.step.objective:Objective"}
"""What a trained role minimizes, by its head. An objective's ``add`` gets the head's outputs in their order."""

ADDERS: dict[str, tuple[str, ...]] = {"megatron": (), "fsdp": ()}
"""By backend, functions of the configuration and a new model without weights, which add modules named ``ADDED``."""

ADDED = "added"


def objective_of(head: str) -> Callable[[RunConfig], Any]:
    """Return the class of the objective of a role with this head."""
    found: Callable[[RunConfig], Any] = resolve("head", head, OBJECTIVES)
    return found


def add_modules(backend: str, config: RunConfig, model: nn.Module) -> None:
    """Add what the run needs besides the model itself."""
    for path in ADDERS[backend]:
        resolve("added module", path, {})(config, model)


def reset_added(model: nn.Module) -> None:
    """Initialize added modules, whose memory is new."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == ADDED:
            module.reset_parameters()


def is_added(parameter: str) -> bool:
    """Return whether a parameter is in no Hugging Face checkpoint of the model, because a role added it."""
    return ADDED in parameter.split(".")
