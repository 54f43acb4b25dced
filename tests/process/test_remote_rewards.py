"""Rewards from a service, through the reward workers."""

import pytest

from slime_like.config import RewardConfig
from slime_like.config.rollout import RewardFunction
from slime_like.errors import RewardError
from slime_like.sandbox.rewards.pool import RewardItem, RewardPool
from tests.support.reward_service import url as url


def test_a_service_that_hangs_ends_the_run_before_it_was_asked_for_every_response(url: str) -> None:
    functions = (RewardFunction(name="http", options={"url": url, "timeout_s": 0.05}),)
    slow = [RewardItem(str(prompt), "slow", "a") for prompt in range(20)]
    reason = r"first 8 responses .* gave no answer within .* see to the service"
    with RewardPool(RewardConfig(functions=functions)) as pool, pytest.raises(RewardError, match=reason):
        pool.score(slow)


def test_a_failure_costs_its_own_sample(url: str) -> None:
    functions = (RewardFunction(name="http", options={"url": url}),)
    with RewardPool(RewardConfig(functions=functions)) as pool:
        outcomes = pool.score([RewardItem("p", asked, "a") for asked in ("plain", "busy", "failed")])
    assert [outcome.rewards for outcome in outcomes] == [(0.5,), (0.0,), (2.0,)]
    assert outcomes[1].metadata["reason"] == "error" and "503" in outcomes[1].metadata["detail"]


def test_the_same_response_to_other_prompts_is_asked_again(url: str) -> None:
    functions = (RewardFunction(name="http", options={"url": url}),)
    with RewardPool(RewardConfig(functions=functions)) as pool:
        outcomes = pool.score([RewardItem(prompt, "r", "a") for prompt in ("one", "two")])
    assert [outcome.metadata["http"]["seen"]["prompt"] for outcome in outcomes] == ["one", "two"]
