"""A component that settings choose by name, with its options."""

from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, field_validator, model_validator

from slime_like.config.base import Section, absolute_code


class Part(Section):
    """A built-in component or custom code. A name alone means all default options.

    In YAML, ``loss: gspo`` or ``loss: {name: gspo, clip_low: 3.0e-4}``; as flags, ``--algorithm.loss.clip_low 3e-4``.
    """

    model_config = ConfigDict(extra="allow")

    name: str

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, data: Any) -> Any:
        if isinstance(data, str):
            return {"name": data}
        if isinstance(data, Mapping):
            return {key: None if value == "none" else value for key, value in data.items()}
        return data

    _absolute = field_validator("name")(absolute_code)

    @property
    def options(self) -> dict[str, Any]:
        """Options that were set, by name."""
        return dict(self.model_extra or {})

    def __str__(self) -> str:
        return self.name
