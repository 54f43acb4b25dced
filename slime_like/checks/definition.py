"""What a check is: a stable code, what it is about, and the function that finds problems."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from slime_like.checks.needs import Needs
from slime_like.config.run import RunConfig
from slime_like.errors import Problem
from slime_like.models.dimensions import ModelDimensions

_FIELD = re.compile(r"[a-z_]+(?:\.\w+)+|[a-z_]+(?==)")
"""The field with which a sentence begins: its dotted name, or a name and its value."""


@dataclass(frozen=True, slots=True)
class Check:
    """A check of the configuration, or of the files that it names.

    Attributes:
        code: stable and unique; what stands before the dot is the section of the configuration.
        needs: it applies to commands that need all of this.
    """

    code: str
    needs: Needs
    run: Callable[[RunConfig], Iterable[str]]

    def find(self, config: RunConfig, _: ModelDimensions | None) -> Iterator[Problem]:
        return _coded(self.code, self.run(config))


@dataclass(frozen=True, slots=True)
class ModelCheck:
    """A check of the configuration against the model's sizes; attributes as in ``Check``."""

    code: str
    needs: Needs
    run: Callable[[RunConfig, ModelDimensions], Iterable[str]]

    def find(self, config: RunConfig, dimensions: ModelDimensions | None) -> Iterator[Problem]:
        return _coded(self.code, () if dimensions is None else self.run(config, dimensions))


def _coded(code: str, sentences: Iterable[str]) -> Iterator[Problem]:
    for text in sentences:
        field = _FIELD.match(text)
        yield Problem(code, text, field.group() if field else "")
