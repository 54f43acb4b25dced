"""Runs the checks that a command needs.

Needs neither torch nor Ray, so that every problem is found before anything starts.
"""

from collections.abc import Iterable

from slime_like.checks.definition import Check, Needs, NeedsOf, training_needs
from slime_like.checks.model_directories import find_dimensions
from slime_like.checks.registry import CHECKS
from slime_like.config.run import RunConfig
from slime_like.errors import ConfigError, Problem
from slime_like.models.dimensions import ModelDimensions

_FILES_OF_MODEL = {"model.path", "model.family", "model.weight-files"}


def selected(needs: Needs) -> list[Check]:
    """The checks that apply to a command with these needs, in the order in which problems are shown."""
    return [check for check in CHECKS if check.needs <= needs]


def check(config: RunConfig, needs: Needs | None = None) -> list[Problem]:
    """Every problem that is found without reading rows; ``needs`` default to those of training."""
    needs = training_needs(config) if needs is None else needs
    dimensions, _ = find_dimensions(config.model.path, "model.path")
    return _run(selected(needs), config, dimensions)


def require_valid(config: RunConfig, needs: Needs | None = None) -> None:
    """
    Raises:
        ConfigError: with every problem that ``check`` finds, and with what is wrong with the data where it finds any.
    """
    needs = training_needs(config) if needs is None else needs
    if problems := check(config, needs):
        raise ConfigError(problems + _check_rows(config, needs))


def with_problems_of_files(error: ConfigError, needs_of: NeedsOf) -> ConfigError:
    """The error of a configuration with wrong fields, and the problems of the files that the other fields name."""
    config = error.rest
    if config is None:
        return error
    needs = needs_of(config)
    reading = [one for one in selected(needs | {"weights"}) if one.code in _FILES_OF_MODEL]
    dimensions, _ = find_dimensions(config.model.path, "model.path")
    model = _run(reading, config, dimensions) if config.model.path.is_dir() else []
    return ConfigError([*error.problems, *model, *_check_rows(config, needs)])


def check_settings(config: RunConfig, dimensions: ModelDimensions, needs: Needs) -> list[Problem]:
    """Problems that are the same on every machine, for a model of these sizes."""
    return _run((one for one in selected(needs) if "files" not in one.needs), config, dimensions)


def check_machine(config: RunConfig, dimensions: ModelDimensions, needs: Needs) -> list[Problem]:
    """What this machine lacks: files, directories that can be written, packages."""
    return _run((one for one in selected(needs) if "files" in one.needs), config, dimensions)


def _check_rows(config: RunConfig, needs: Needs) -> list[Problem]:
    """A missing tokenizer, and the first bad row of each file, as far as it is found without a tokenizer."""
    reading = [one for one in selected(needs | {"rows"}) if "rows" in one.needs]
    return list({problem.text: problem for problem in _run(reading, config, None)}.values())


def _run(checks: Iterable[Check], config: RunConfig, dimensions: ModelDimensions | None) -> list[Problem]:
    return [problem for one in checks for problem in one.find(config, dimensions)]
