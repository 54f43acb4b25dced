"""Rewards of whole groups, alone and with functions of single responses, and the cost of a failure."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from slime_like.config.rollout import RewardConfig, RewardFunction
from slime_like.errors import RewardError
from slime_like.sandbox.rewards.pool import RewardItem, RewardPool
from tests.support.rejections import Rejects

MODULE = """
import os, time
from slime_like.interfaces import RewardResult, group_reward

@group_reward
def rank(prompt, responses, answer, *, scale=1.0):
    if "hang" in responses:
        time.sleep(1000)
    if "die" in responses:
        os._exit(1)
    if "raise" in responses:
        raise LookupError("no such thing")
    if "few" in responses:
        return [RewardResult(1.0, True)]
    order = sorted(range(len(responses)), key=lambda i: len(responses[i]))
    return [RewardResult(scale * order.index(i), i == order[-1], {"of": len(responses), "prompt": prompt + answer})
            for i in range(len(responses))]
"""
BY_LENGTH = RewardFunction(name="ranks:rank", options={"scale": 10.0})
LETTERS = RewardFunction(name="format", options={"pattern": "[a-z]+"})


@pytest.fixture(autouse=True)
def _module(user_module: Callable[[str, str], Path]) -> None:
    user_module("ranks", MODULE)


def config(*functions: RewardFunction) -> RewardConfig:
    return RewardConfig(functions=functions, timeout_s=1.5)


def items(*groups: tuple[str, ...]) -> tuple[list[RewardItem], list[int]]:
    pairs = [(RewardItem(f"p{g}", text, f"a{g}"), g) for g, group in enumerate(groups) for text in group]
    return [item for item, _ in pairs], [group for _, group in pairs]


def test_a_function_receives_its_group_and_columns_are_in_order() -> None:
    """Two equal responses are one item for ``format`` and two for ``rank``. Groups may be interleaved."""
    found, groups = items(("aaa", "b", "b1"), ("x", "x"))
    shuffled = [3, 0, 4, 1, 2]
    with closing(RewardPool(config(LETTERS, BY_LENGTH))) as pool:
        outcomes = pool.score([found[i] for i in shuffled], [groups[i] for i in shuffled])
        single = pool.score(found[:2])  # every item is a group
    in_order = [outcomes[shuffled.index(i)] for i in range(5)]
    assert [outcome.rewards for outcome in in_order] == [(1, 20), (1, 0), (0, 10), (1, 0), (1, 10)]
    assert [outcome.successes for outcome in in_order] == [(1, 1), (1, 0), (0, 0), (1, 0), (1, 1)]
    assert in_order[0].metadata == {"ranks:rank": {"of": 3, "prompt": "p0a0"}}
    assert [outcome.rewards for outcome in single] == [(1, 0), (1, 0)]
    with closing(RewardPool(config(BY_LENGTH, LETTERS))) as pool:
        assert pool.score(found, groups)[0].rewards == (20, 1)
    with closing(RewardPool(config(BY_LENGTH))) as pool:
        assert [outcome.rewards for outcome in pool.score(found, groups)] == [(20,), (0,), (10,), (0,), (10,)]


@pytest.mark.parametrize(
    ("word", "reason"), [("hang", "timeout"), ("die", "crash"), ("raise", "error"), ("few", "error")]
)
def test_a_failure_costs_its_own_group(word: str, reason: str) -> None:
    found, groups = items(("aaa", "b"), (word, "b"), ("c", "dd"))
    with closing(RewardPool(config(LETTERS, BY_LENGTH))) as pool:
        outcomes = pool.score(found, groups)
    assert [outcome.rewards for outcome in outcomes] == [(1, 10), (1, 0), (0, 0), (0, 0), (1, 0), (1, 10)]
    assert [outcome.metadata.get("reason") for outcome in outcomes] == [None, None, reason, reason, None, None]


def test_a_function_that_fails_on_group_after_group_ends_the_run(rejects: Rejects) -> None:
    with closing(RewardPool(config(LETTERS, BY_LENGTH))) as pool:
        for words in (*[("raise", "b")] * 7, ("a", "b"), *[("raise", "b")] * 7):
            pool.score(*items(words))
        with rejects(RewardError, "reward-function-fails"):
            pool.score(*items(("raise", "b")))


def test_a_pool_without_functions_has_no_workers() -> None:
    with closing(RewardPool(config(RewardFunction(name="environment")))) as pool:
        pool.start()
        assert pool.process_ids == ()
        assert [outcome.rewards for outcome in pool.score(*items(("a", "b")))] == [(), ()]
