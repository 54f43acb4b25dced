"""What a command needs of a configuration and of this machine. A check applies where all that it is about is needed."""

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import Literal

from slime_like.config.run import RunConfig

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
    "evaluation",  # held-out accuracy is all that is asked for
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
