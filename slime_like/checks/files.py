"""What is wrong with the files of a configuration with wrong fields: told in the same list, not in the next."""

from collections.abc import Iterator

from slime_like.checks.check import check_rows
from slime_like.checks.families import family_problems
from slime_like.checks.model_directories import find_dimensions, weight_problems
from slime_like.checks.needs import Needs, NeedsOf
from slime_like.config.run import RunConfig
from slime_like.errors import ConfigError


def with_problems_of_files(error: ConfigError, needs_of: NeedsOf) -> ConfigError:
    """The error of a configuration with wrong fields, and what is wrong with the files that the others name."""
    if error.rest is None:
        return error
    needs = needs_of(error.rest)
    return ConfigError([*error.problems, *_model_problems(error.rest, needs), *check_rows(error.rest, needs)])


def _model_problems(config: RunConfig, needs: Needs) -> Iterator[str]:
    path = config.model.path
    if not path.is_dir():
        return
    dimensions, problems = find_dimensions(path, "model.path")
    yield from problems
    if dimensions is not None:
        yield from family_problems(config, dimensions) if "trainer" in needs else ()
        yield from weight_problems(path, "model.path", dimensions)
