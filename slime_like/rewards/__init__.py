"""Reward functions and the worker processes they run in."""

from slime_like.rewards.result import RewardResult

__all__ = ["RewardResult"]
