"""The part of a rejected configuration that is right, so that further checks can read it."""

from collections.abc import Iterable
from copy import deepcopy
from itertools import takewhile
from typing import Any

from pydantic_core import ErrorDetails

from slime_like.config.base import Section
from slime_like.config.reading.fields import all_fields
from slime_like.config.reading.problems import conflicting_fields, suggestion
from slime_like.config.run import RunConfig
from slime_like.errors import Problem

Place = tuple[str, ...]
"""Keys that lead to a value of the configuration."""

_REQUIRED: dict[Place, Any] = {("run_dir",): ".", ("model",): {"path": "."}, ("model", "path"): "."}
"""Values that stand in for required fields until ``forget`` takes them out."""


def wrong_places(details: Iterable[ErrorDetails]) -> set[Place]:
    """What has no value: a wrong field, an unknown key and the field that it may mean, or fields in conflict."""
    places: set[Place] = set()
    for detail in details:
        keys = tuple(takewhile(lambda key: isinstance(key, str), detail["loc"]))
        names = [str(key) for key in keys]
        fields = conflicting_fields(detail)
        places |= {(*names, field) for field in fields} if fields else {_of_a_field(tuple(names))}
        if detail["type"] == "extra_forbidden":
            places |= _meant(".".join(names))
    return places - {()}  # a key that is no text


def places_of(problems: Iterable[Problem]) -> set[Place]:
    """What flags with a problem were to set."""
    named = {problem.field for problem in problems if problem.field}
    return {_of_a_field(tuple(name.split("."))) for name in named}.union(*map(_meant, named))


def without(data: dict[str, Any], places: Iterable[Place]) -> dict[str, Any]:
    """A copy of ``data`` without these places; required ones get a value that stands in."""
    rest = deepcopy(data)
    for place in sorted(places):
        section: Any = rest
        for key in place[:-1]:
            section = section.get(key) if isinstance(section, dict) else None
        if isinstance(section, dict):
            section.pop(place[-1], None)
            if place in _REQUIRED:
                section[place[-1]] = deepcopy(_REQUIRED[place])
    return rest


def forget(config: RunConfig, places: Iterable[Place]) -> RunConfig:
    """A copy of ``config`` in which reading one of these places raises ``UnknownField``."""
    rest = config.model_copy(deep=True)
    for place in places:
        section: Any = rest
        for key in place[:-1]:
            section = section.__dict__.get(key) if isinstance(section, Section) else None
        if isinstance(section, Section) and place[-1] in type(section).model_fields:
            section.__dict__.pop(place[-1], None)
            section.model_fields_set.add(place[-1])  # it was given
    return rest


def _meant(name: str) -> set[Place]:
    known = all_fields()
    near = None if name in known else suggestion(name, list(known))
    return set() if near is None else {tuple(near.split("."))}


def _of_a_field(place: Place) -> Place:
    """The field that holds ``place``, where it lies inside of one."""
    prefixes = (place[:end] for end in range(1, len(place)))
    return next((prefix for prefix in prefixes if ".".join(prefix) in all_fields()), place)
