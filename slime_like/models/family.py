"""Registry of the model families that this project knows."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Family:
    """One model family: how to read its ``config.json``, and where its layers are built.

    Attributes:
        name: transformers' model type.
        architecture: first entry of ``architectures`` in ``config.json``.
        read: returns the fields of ``ModelDimensions`` for the content of ``config.json``, without the family and the
            EOS ids. Raises like the readers in ``config_json``.
        megatron: module in ``backends.megatron.families`` with settings, layers and conversion rules.
        tiny: fields of the family's transformers configuration in which a tiny model differs from other families'.
    """

    name: str
    architecture: str
    read: Callable[[dict[str, Any]], dict[str, Any]]
    megatron: str = "grouped_query"
    tiny: Mapping[str, Any] = field(default_factory=dict)


FAMILIES: dict[str, Family] = {}
"""All families by name. ``slime_like.models.families`` fills it."""
