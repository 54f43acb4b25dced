"""Whatever is chosen by name is registered, documented with its source, and named when a name is unknown."""

import re
from typing import get_args

import pytest

from slime_like.algorithms import CATALOGUE, describe, find
from slime_like.config.algorithm import ADVANTAGES, CORRECTIONS, KL_ESTIMATORS, LOSSES, AlgorithmConfig
from tests.support.rejections import Rejects

EVERYTHING = [(kind, name) for kind, registry in CATALOGUE.items() for name in registry]
SOURCE = re.compile(r"arXiv:\d{4}\.\d{5}|DeepSeek-V3\.2, section|\b(19|20)\d\d\b")


@pytest.mark.parametrize(("kind", "name"), EVERYTHING, ids=[f"{kind} {name}" for kind, name in EVERYTHING])
def test_each_says_its_formula_and_its_source(kind: str, name: str) -> None:
    text = describe(kind, name)
    assert SOURCE.search(text), text


@pytest.mark.parametrize("kind", CATALOGUE)
def test_an_unknown_name_lists_the_known_ones(rejects: Rejects, kind: str) -> None:
    with rejects(ValueError) as caught:
        find(kind, "nothing")
    assert all(name in str(caught.value) for name in CATALOGUE[kind])
    with rejects(ValueError):
        find("los", "gspo")


def test_the_configuration_offers_what_is_registered() -> None:
    fields = AlgorithmConfig.model_fields
    assert set(CATALOGUE["loss"]) == set(LOSSES)
    assert set(CATALOGUE["advantage estimator"]) == set(ADVANTAGES)
    assert set(CATALOGUE["KL estimator"]) == set(KL_ESTIMATORS)
    assert {"none", *CATALOGUE["importance correction"]} == set(CORRECTIONS)
    for kind, field in (
        ("KL estimator", "kl_reward_estimator"),
        ("reduction", "reduction"),
        ("importance level", "importance_level"),
    ):
        assert set(get_args(fields[field].annotation)) == set(CATALOGUE[kind]), field
