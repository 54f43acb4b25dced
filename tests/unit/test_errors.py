"""Errors reach the user whole, also from another process."""

import copy
import pickle
from collections.abc import Callable

import pytest
from ray.exceptions import RayError, RayTaskError

from slime_like.errors import ConfigError, Problem, SlimeLikeError, TrainerError


def _through_ray(error: SlimeLikeError) -> SlimeLikeError:
    """Send ``error`` as Ray sends a task's exception: as the cause of a ``RayTaskError``, pickled."""
    arrived = RayError.from_bytes(RayTaskError("train", "the worker's traceback", error).to_bytes())
    cause: SlimeLikeError = arrived.cause
    return cause


ROADS: dict[str, Callable[[SlimeLikeError], SlimeLikeError]] = {
    "pickle": lambda error: pickle.loads(pickle.dumps(error)),
    "copy": copy.copy,
    "ray": _through_ray,
}
ERRORS: list[SlimeLikeError] = [
    TrainerError("NaN loss", code="loss-nan", who="rank 3", phase="step", remedy="lower lr", users_traceback="Trace"),
    ConfigError("a=1 is wrong"),
    ConfigError(["two\nlines", Problem("field-range", "steps=0 is out of range", "steps")], code="plan-rejected"),
]


@pytest.mark.parametrize("road", ROADS)
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.code)
def test_an_error_arrives_with_all_that_it_had(road: str, error: SlimeLikeError) -> None:
    arrived = ROADS[road](error)
    assert type(arrived) is type(error) and str(arrived) == str(error)
    assert vars(arrived) == vars(error)


def test_a_configuration_error_has_the_code_of_its_only_kind_of_problem() -> None:
    known = Problem("field-range", "steps=0 is out of range", "steps")
    assert ConfigError([known, known]).code == "field-range"
    assert ConfigError("a", code="x").code == "x"
    assert ConfigError([known, "a"]).code == "config"
    assert ConfigError("a").problems == [Problem("config", "a")]
