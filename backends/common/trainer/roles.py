"""Registry of objectives by a role's head, and the name of modules that a role adds to its model."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from slime_like.config import AlgorithmConfig
from slime_like.config.roles import ModelRole
from slime_like.config.sections import CriticConfig, DistillationConfig
from slime_like.interfaces import Scores
from slime_like.plugins.resolve import resolve

OBJECTIVES = {
    "logprob": "backends.common.step.objective:Objective",
    "value": "backends.common.step.value_objective:ValueObjective",
}
"""Objective of a trained role, by the name of its head. Its ``add`` method gets the head's outputs in order."""

ADDED = "added"


def objective_of(role: ModelRole, algorithm: AlgorithmConfig, critic: CriticConfig, teacher: DistillationConfig) -> Any:
    """Return the objective of a trained role; ``None`` for a frozen one."""
    if not role.trained:
        return None
    made: Callable[..., Any] = resolve("head", role.head, OBJECTIVES)
    return made(algorithm, critic if role.head == "value" else teacher)


def named_scores(role: ModelRole, scored: list[tuple[Tensor, ...]] | None) -> list[Scores] | None:
    """Return the head's outputs that the role's fields hold, in float32."""
    if scored is None:
        return None
    return [{name: values.float() for name, values in zip(role.fields, outputs, strict=False)} for outputs in scored]


def is_added(parameter: str) -> bool:
    """Return whether a parameter is in no Hugging Face checkpoint of the model, because a role added it."""
    return ADDED in parameter.split(".")
