"""What a check is: a stable code, what it needs of a command, and the function that finds problems."""

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal

from slime_like.config.run import RunConfig
from slime_like.errors import Problem, field_of
from slime_like.models.dimensions import ModelDimensions

Need = Literal[
    "files",  # what lies on this machine: files, directories, packages
    "run",  # processes that compute, in a run directory
    "model",  # the sizes of model.path, as far as they can be read
    "weights",  # the weight files of model.path
    "trainer",  # trainer ranks compute the model
    "training",  # an objective, its data and its schedule
    "engine",  # engines sample, and rewards judge
    "data",  # prompts
    "code",  # rewards of the user are imported, by a worker
    "evaluation",  # held-out accuracy alone
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
        """Find problems; none that depend on the model's sizes if they are ``None``."""
        if "model" not in self.needs:
            found = self.run(config)
        else:
            found = () if dimensions is None else self.run(config, dimensions)
        for text in found:
            yield Problem(self.code, text, field_of(text))
