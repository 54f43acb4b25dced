"""Registry of objectives by a role's head, and the name of modules that a role adds to its model."""

from collections.abc import Callable
from typing import Any

from slime_like.config import AlgorithmConfig
from slime_like.plugins.resolve import resolve

OBJECTIVES = {"logprob": "backends.common.step.objective:Objective"}
"""Objective of a trained role, by the name of its head. Its ``add`` method gets the head's outputs in order."""

ADDED = "added"


def objective_of(head: str) -> Callable[[AlgorithmConfig], Any]:
    """Return the class of the objective of a role with this head."""
    found: Callable[[AlgorithmConfig], Any] = resolve("head", head, OBJECTIVES)
    return found


def is_added(parameter: str) -> bool:
    """Return whether a parameter is in no Hugging Face checkpoint of the model, because a role added it."""
    return ADDED in parameter.split(".")
