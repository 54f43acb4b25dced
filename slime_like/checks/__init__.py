"""Checks of a configuration against files, models, engines and user code, before anything starts.

A check has a stable code, the commands that it applies to, and its function.
"""

from collections.abc import Callable, Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Literal

from slime_like.config.run import RunConfig
from slime_like.config.sections import ModelConfig
from slime_like.models.dimensions import ModelDimensions

Need = Literal[
    "files",  # files, directories and packages of this machine
    "run",  # processes that compute, in a run directory
    "model",  # the sizes of model.path, as far as they can be read
    "weights",  # the weight files of model.path
    "trainer",  # trainer ranks compute the model
    "training",  # an objective, its data and its schedule
    "engine",  # engines sample, and rewards judge
    "data",  # prompts
    "code",  # custom code is imported, and options are tried
    "evaluation",  # only the held-out accuracy
]
Needs = AbstractSet[Need]

CONVERSION: Needs = frozenset({"files", "model", "trainer"})
RANKS: Needs = CONVERSION | {"run"}
"""Needs of trainer ranks without engines, rewards and prompts."""
EVALUATION: Needs = frozenset({"files", "run", "model", "weights", "engine", "data", "code", "evaluation"})
"""Needs of ``slime-like eval``, which has engines whatever the configuration says about training."""


def training_needs(config: RunConfig) -> Needs:
    """Return the needs of ``slime-like train``; in supervised mode without engines."""
    needs: Needs = RANKS | {"training", "data", "code"}
    # Engines always load model.path.
    return loading_needs(config.model, needs) if config.supervised else needs | {"engine", "weights"}


def loading_needs(model: ModelConfig, needs: Needs) -> Needs:
    """Return ``needs``, and the weight files of ``model.path`` unless ``model.weights`` replaces all of them."""
    return needs | {"weights"} if model.weights is None or model.lora.is_set else needs


@dataclass(frozen=True, slots=True)
class Check:
    """A check of the configuration, or of files that it names.

    Attributes:
        code: stable and unique. The part before the dot is the section of the configuration.
        needs: the check applies to commands with all these needs.
        run: yields one sentence per problem.
        sized: like ``run``, but finds none if the model's sizes are unknown.
    """

    code: str
    needs: Needs
    run: Callable[[RunConfig], Iterable[str]] = lambda _: ()
    sized: Callable[[RunConfig, ModelDimensions], Iterable[str]] = lambda _, __: ()
