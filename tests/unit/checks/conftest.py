"""Rejected configurations, by the check that finds the fault."""

from collections.abc import Callable

import pytest

from slime_like.checks.check import require_valid
from slime_like.config.reading.load import load_config
from slime_like.errors import ConfigError, Problem
from tests.support.rejections import Rejects

Rejected = Callable[[list[str], str], Problem]


@pytest.fixture
def rejected(rejects: Rejects) -> Rejected:
    """Require of flags exactly one problem, with this code and the golden file's sentence."""

    def only_problem(flags: list[str], code: str) -> Problem:
        with rejects(ConfigError, code) as caught:
            require_valid(load_config(None, flags))
        assert isinstance(caught.value, ConfigError)
        (problem,) = caught.value.problems
        return problem

    return only_problem
