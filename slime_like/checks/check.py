"""Runs the checks that a command needs.

Needs neither torch nor Ray, so that every problem is found before anything starts.
"""

from collections.abc import Iterable

from slime_like.checks.definition import Check, ModelCheck, Problem
from slime_like.checks.model_directories import find_dimensions
from slime_like.checks.needs import Needs, training_needs
from slime_like.checks.registry import CHECKS
from slime_like.config.run import RunConfig
from slime_like.errors import ConfigError
from slime_like.models.dimensions import ModelDimensions


def selected(needs: Needs) -> list[Check | ModelCheck]:
    """The checks that apply to a command with these needs, in the order in which problems are shown."""
    return [check for check in CHECKS if check.needs <= needs]


def find_problems(config: RunConfig, needs: Needs) -> list[Problem]:
    """Every problem that is found without reading rows; empty where the command may start."""
    dimensions, _ = find_dimensions(config.model.path, "model.path")
    return _run(selected(needs), config, dimensions)


def check(config: RunConfig, needs: Needs | None = None) -> list[str]:
    """Every problem as one sentence with field, value and remedy. ``needs`` default to those of training."""
    return _texts(find_problems(config, training_needs(config) if needs is None else needs))


def check_rows(config: RunConfig, needs: Needs) -> list[str]:
    """No tokenizer, and the first bad row of each file, as far as it can be told without one."""
    reading = [one for one in selected(needs | {"rows"}) if "rows" in one.needs]
    return list(dict.fromkeys(_texts(_run(reading, config, None))))


def require_valid(config: RunConfig, needs: Needs | None = None) -> None:
    """
    Raises:
        ConfigError: with every problem that ``check`` finds, and with what is wrong with the data where it finds any.
    """
    needs = training_needs(config) if needs is None else needs
    problems = check(config, needs)
    if problems:
        raise ConfigError(problems + check_rows(config, needs))


def check_settings(config: RunConfig, dimensions: ModelDimensions, needs: Needs) -> list[str]:
    """Problems that are the same on every machine, for a model of these sizes."""
    return _texts(_run((one for one in selected(needs) if "files" not in one.needs), config, dimensions))


def check_machine(config: RunConfig, dimensions: ModelDimensions, needs: Needs) -> list[str]:
    """What this machine lacks: files, directories that can be written, packages."""
    return _texts(_run((one for one in selected(needs) if "files" in one.needs), config, dimensions))


def _run(checks: Iterable[Check | ModelCheck], config: RunConfig, dimensions: ModelDimensions | None) -> list[Problem]:
    """What is about the model is left out where its sizes are not known."""
    known = (one for one in checks if dimensions is not None or "model" not in one.needs)
    return [problem for one in known for problem in one.find(config, dimensions)]


def _texts(problems: Iterable[Problem]) -> list[str]:
    return [problem.text for problem in problems]
