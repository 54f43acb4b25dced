"""Checks of the model directories that a configuration names."""

import re
from collections.abc import Iterator
from pathlib import Path

from slime_like.checks.layout import layout_problems
from slime_like.config.algorithm import AlgorithmConfig
from slime_like.config.run import RunConfig
from slime_like.config.sections import ReferenceConfig
from slime_like.errors import ConfigError
from slime_like.models.dimensions import ModelDimensions
from slime_like.models.weight_files import weight_file_problems
from slime_like.system.words import from_here

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def find_dimensions(path: Path, field: str) -> tuple[ModelDimensions | None, list[str]]:
    """Return the dimensions of the checkpoint at ``path``, or ``None`` and its problems. ``field`` is the setting."""
    if absent := _missing(path, field):
        return None, absent
    try:
        return ModelDimensions.from_checkpoint(path), []
    except ConfigError as error:
        return None, [problem.text.replace("model.path=", f"{field}=", 1) for problem in error.problems]


def _missing(path: Path, field: str) -> list[str]:
    if path.is_dir():
        return []
    name = str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else ""
    download = f": `hf download {name} --local-dir {path.name}` writes one" if _HUB_NAME.fullmatch(name) else ""
    problem = "is a file" if path.is_file() else f"does not exist{from_here(path)}"
    return [f"{field}={path} {problem}; give a Hugging Face checkpoint directory{download}"]


def weight_problems(path: Path, field: str, dimensions: ModelDimensions) -> list[str]:
    return [f"{field}: {problem}" for problem in weight_file_problems(path, dimensions)]


def reference_problems(config: RunConfig, policy: ModelDimensions) -> Iterator[str]:
    """Check the reference as far as its ``config.json`` shows."""
    path = config.reference.path
    if not config.algorithm.needs_reference:
        # An unused directory may contain anything, but a missing one is a mistake.
        yield from [] if path is None else _missing(path, "reference.path")
        return
    reference: ModelDimensions | None = policy
    if path is not None:
        reference, problems = find_dimensions(path, "reference.path")
        yield from problems
    if reference is None:
        return
    if reference.vocab_size != policy.vocab_size:
        yield (
            f"reference.path={path} has {reference.vocab_size} tokens and model.path {policy.vocab_size}, so their "
            "logprobs cannot be compared; use a reference with the policy's tokenizer"
        )
    if config.reference.update_interval and reference != policy:
        yield (
            f"reference.update_interval={config.reference.update_interval} copies the policy's weights, but "
            f"reference.path={path} has other sizes than model.path={config.model.path}; use 0, or a reference with "
            "the policy's sizes"
        )
    if config.reference.placement == "workers":
        problems = layout_problems(config.reference.parallel, reference)
        yield from (problem.replace("trainer.parallel", "reference.parallel") for problem in problems)


def reference_weight_problems(settings: ReferenceConfig, algorithm: AlgorithmConfig) -> list[str]:
    """Check the reference's weight files, if they are not the policy's."""
    path = settings.path
    if path is None or not algorithm.needs_reference:
        return []
    reference = find_dimensions(path, "reference.path")[0]
    return [] if reference is None else weight_problems(path, "reference.path", reference)
