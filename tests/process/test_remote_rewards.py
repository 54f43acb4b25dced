"""Rewards from a service, through the reward workers."""

from typing import Any

import pytest

from slime_like.config import RewardConfig
from slime_like.config.rollout import RewardFunction
from slime_like.errors import RewardError
from slime_like.sandbox.rewards.pool import RewardItem, RewardPool
from tests.support.reward_service import url as url


def pool_of(**options: Any) -> RewardPool:
    return RewardPool(RewardConfig(functions=(RewardFunction(name="http", options=options),)))


def test_a_service_that_hangs_ends_the_run_before_it_was_asked_for_every_response(url: str) -> None:
    slow = [RewardItem(str(prompt), "slow", "a") for prompt in range(20)]
    with pool_of(url=url, timeout_s=0.05) as pool, pytest.raises(RewardError) as caught:
        pool.score(slow)
    assert (caught.value.code, caught.value.remedy) == (
        "reward-function-fails",
        "see to the service, or to reward.functions",
    )


def test_a_failure_costs_its_own_sample(url: str) -> None:
    with pool_of(url=url) as pool:
        outcomes = pool.score([RewardItem("p", asked, "a") for asked in ("plain", "busy", "failed")])
    assert [outcome.rewards for outcome in outcomes] == [(0.5,), (0.0,), (2.0,)]
    assert outcomes[1].metadata["reason"] == "error" and "503" in outcomes[1].metadata["detail"]


def test_the_same_response_to_other_prompts_is_asked_again(url: str) -> None:
    with pool_of(url=url) as pool:
        outcomes = pool.score([RewardItem(prompt, "r", "a") for prompt in ("one", "two")])
    assert [outcome.metadata["http"]["seen"]["prompt"] for outcome in outcomes] == ["one", "two"]
