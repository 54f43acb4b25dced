"""Reward functions and the worker processes they run in."""

from slime_like.rewards.result import RewardResult, group_reward

__all__ = ["RewardResult", "group_reward"]
