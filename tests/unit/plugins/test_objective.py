"""The table of the objective's parts, against the objects that it names and their signatures."""

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any, get_args, get_type_hints

import pytest

from slime_like.algorithms import importance
from slime_like.algorithms.advantages import AdvantageEstimator, find_estimator
from slime_like.algorithms.losses import kl
from slime_like.algorithms.losses.loss import find_policy
from slime_like.algorithms.reduction import build_reduction
from slime_like.config.algorithm import ImportanceConfig, KLRewardConfig
from slime_like.config.reading.fields import value_text
from slime_like.config.reading.parts import documented
from slime_like.plugins import objective
from slime_like.plugins.resolve import resolve

PARTS = {**objective.LOSSES, **objective.ADVANTAGES, **objective.REDUCTIONS}
WORDS = {int: "integer", float: "number"}


def _signature(made: Any) -> Mapping[str, tuple[Any, Any]]:
    """Return (type, default) of each option, ``MISSING`` if it is required."""
    if isinstance(made, AdvantageEstimator):
        hints, given = get_type_hints(made.compute), inspect.signature(made.compute).parameters.values()
        return {one.name: (hints[one.name], one.default) for one in given if one.kind is one.KEYWORD_ONLY}
    if not dataclasses.is_dataclass(made):
        assert made() is not None
        return {}
    hints = get_type_hints(made)
    return {field.name: (hints[field.name], field.default) for field in dataclasses.fields(made)}


@pytest.mark.parametrize("name", PARTS)
def test_documented_options_are_those_of_the_code(name: str) -> None:
    expected = _signature(resolve("part", name, PARTS))
    found = {option.name: option for option in documented(name, PARTS[name]).options}
    assert [*found] == [*expected]
    for option, (kind, default) in expected.items():
        shown = None if default is dataclasses.MISSING else value_text(default)
        word = WORDS[next(iter({*get_args(kind)} - {type(None)}), kind)]
        assert (found[option].default, found[option].type_text) == (shown, word)
        assert found[option].meaning


def test_names_and_traits_are_those_of_the_code() -> None:
    assert [find_policy(name).name for name in objective.LOSSES] == [*objective.LOSSES]
    per_sequence = [name for name in objective.LOSSES if find_policy(name).per_sequence]
    assert per_sequence == [*objective.SEQUENCE_LOSSES]
    scopes = {name: find_estimator(name).scope for name in objective.ADVANTAGES}
    assert {name for name, scope in scopes.items() if scope == "batch"} == {*objective.BATCH_ADVANTAGES}
    assert {name for names in objective.ALIASES.values() for name in names}.isdisjoint(PARTS)
    for field, known in (("loss", objective.LOSSES), ("advantage", objective.ADVANTAGES)):
        assert {*objective.ALIASES[field].values()} <= known.keys()


def test_names_of_functions_are_those_of_the_settings() -> None:
    assert {"none", *importance.CORRECTIONS} == {*objective.CORRECTIONS}
    assert kl.KL_ESTIMATORS.keys() == {*objective.KL_ESTIMATORS}
    assert {*get_args(KLRewardConfig.model_fields["estimator"].annotation)} == {*objective.KL_ESTIMATORS}
    assert {*get_args(ImportanceConfig.model_fields["level"].annotation)} == {*importance.LEVELS}


def test_an_option_that_is_missing_or_unknown_is_rejected() -> None:
    for name, options in (("constant", {}), ("tokens", {"length": 8}), ("constant", {"length": 0})):
        with pytest.raises(ValueError, match="; "):
            build_reduction(name, **options)
