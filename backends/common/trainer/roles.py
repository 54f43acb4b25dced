"""Registries of objectives, added modules and class variants. A new kind of role adds one import path here."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from slime_like.config import AlgorithmConfig, ModelConfig
from slime_like.plugins.resolve import resolve

OBJECTIVES = {"logprob": "backends.common.step.objective:Objective"}
"""Objective of a trained role, by the name of its head. Its ``add`` method gets the head's outputs in order."""

ADDERS: dict[str, tuple[str, ...]] = {
    "megatron": ("backends.megatron.lora:add_factors",),
    "fsdp": ("backends.fsdp.lora:add_factors",),
}
"""By backend, functions of the section `model` and a new model without weights, which add modules named ``ADDED``."""

ADDED = "added"

VARIANTS: dict[str, str] = {}
"""Import paths of subclasses to use instead of a backend's class, such as its state, by that class's name."""

_Class = TypeVar("_Class", bound=type)


def objective_of(head: str) -> Callable[[AlgorithmConfig], Any]:
    """Return the class of the objective of a role with this head."""
    found: Callable[[AlgorithmConfig], Any] = resolve("head", head, OBJECTIVES)
    return found


def add_modules(backend: str, settings: ModelConfig, model: nn.Module) -> None:
    """Add what the run needs besides the model itself."""
    for path in ADDERS[backend]:
        resolve("added module", path, {})(settings, model)


def variant_of(own: _Class) -> _Class:
    """Return the class to use instead of ``own``, by default itself."""
    found: _Class = resolve("variant", own.__name__, {own.__name__: own, **VARIANTS})
    return found


def reset_added(model: nn.Module) -> None:
    """Initialize added modules, whose memory is new."""
    for name, module in model.named_modules():
        if name.rpartition(".")[2] == ADDED:
            module.reset_parameters()


def is_added(parameter: str) -> bool:
    """Return whether a parameter is in no Hugging Face checkpoint of the model, because a role added it."""
    return ADDED in parameter.split(".")
