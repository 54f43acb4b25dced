"""What a check is: a stable code, what it needs of a command, and the function that finds problems."""

import re
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, NoReturn

from slime_like.config.run import RunConfig
from slime_like.errors import Problem
from slime_like.models.dimensions import ModelDimensions

Need = Literal[
    "files",  # what lies on this machine: files, directories, packages
    "run",  # processes that compute, in a run directory
    "model",  # the sizes of model.path, as far as they can be read
    "weights",  # the weight files of model.path
    "trainer",  # trainer ranks compute the model
    "training",  # an objective, its data and its schedule
    "engine",  # engines sample, and rewards judge
    "data",  # rows and their tokens
    "code",  # rewards of the user are imported, by a worker
    "evaluation",  # held-out accuracy alone
    "rows",  # each row is read
]
Needs = AbstractSet[Need]
NeedsOf = Callable[[RunConfig], Needs]

CONVERSION: Needs = frozenset({"files", "model", "trainer"})
RANKS: Needs = CONVERSION | {"run"}
"""Trainer ranks alone: neither engines nor rewards are started, and no prompts are read."""


def training_needs(config: RunConfig) -> Needs:
    """``slime-like train``; in supervised mode without engines."""
    needs: Needs = RANKS | {"training", "data"}
    # Engines load model.path in any case.
    return loading_needs(config, needs) if config.supervised else needs | {"engine", "code", "weights"}


def evaluation_needs(config: RunConfig) -> Needs:
    """``slime-like eval``: engines, whatever ``config`` says of training."""
    return frozenset({"files", "run", "model", "weights", "engine", "data", "code", "evaluation"})


def loading_needs(config: RunConfig, needs: Needs) -> Needs:
    """``needs``, and the weight files of ``model.path`` unless the weights are those of ``model.weights``."""
    return needs | {"weights"} if config.model.weights is None else needs


_FIELD = re.compile(r"[a-z_]+(?:\.\w+)+|[a-z_]+(?==)")
"""The field with which a sentence begins: its dotted name, or a name and its value."""


@dataclass(frozen=True, slots=True)
class Check:
    """A check of the configuration, or of the files that it names.

    Attributes:
        code: stable and unique; what stands before the dot is the section of the configuration.
        needs: it applies to commands that need all of this.
        run: takes the configuration, and the model's sizes where it needs these, and finds problems, each one sentence.
    """

    code: str
    needs: Needs
    run: Callable[..., Iterable[str]]

    def find(self, config: RunConfig, dimensions: ModelDimensions | None) -> Iterator[Problem]:
        """Find what can be found without the model's sizes if they are ``None``."""
        with suppress(SizesUnknown):
            for text in self.run(config, dimensions or _UnknownSizes()) if "model" in self.needs else self.run(config):
                field = _FIELD.match(text)
                yield Problem(self.code, text, field.group() if field else "")


class SizesUnknown(Exception):
    """A check read a size of a model that cannot be read; it ends there."""


class _UnknownSizes:
    """Sizes of a model that cannot be read."""

    def __getattr__(self, name: str) -> NoReturn:
        raise SizesUnknown(name)
