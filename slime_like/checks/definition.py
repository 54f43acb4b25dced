"""What a check is: a stable code, what it is about, and the function that finds problems."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from slime_like.checks.needs import Needs
from slime_like.config.run import RunConfig
from slime_like.models.dimensions import ModelDimensions


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault.

    Attributes:
        code: of the check that found it.
        text: one sentence with field, value and remedy.
    """

    code: str
    text: str


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
        return (Problem(self.code, text) for text in self.run(config))


@dataclass(frozen=True, slots=True)
class ModelCheck:
    """A check of the configuration against the model's sizes; attributes as in ``Check``."""

    code: str
    needs: Needs
    run: Callable[[RunConfig, ModelDimensions], Iterable[str]]

    def find(self, config: RunConfig, dimensions: ModelDimensions | None) -> Iterator[Problem]:
        texts = () if dimensions is None else self.run(config, dimensions)
        return (Problem(self.code, text) for text in texts)
