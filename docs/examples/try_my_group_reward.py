"""Score one group with the reward, in worker processes like a run's."""

from slime_like.config import RewardConfig, RewardFunction
from slime_like.sandbox.rewards.pool import RewardItem, RewardPool

items = [RewardItem("6*7=", text, "42") for text in ("so it is 42", "42", "41")]
with RewardPool(RewardConfig(functions=(RewardFunction(name="my_group_reward:shortest_right"),))) as pool:
    outcomes = pool.score(items, groups=[0, 0, 0])
assert [outcome.rewards for outcome in outcomes] == [(1.0,), (1.5,), (0.0,)]
