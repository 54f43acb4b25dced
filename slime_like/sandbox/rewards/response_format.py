"""Reward for a response of a given form."""

import re

from slime_like.interfaces.reward import RewardResult


def response_format(prompt: str, response: str, answer: str, *, pattern: str) -> RewardResult:
    """1 where the whole response matches the regular expression ``pattern`` (``.`` matches line breaks too), else 0."""
    matched = re.fullmatch(pattern, response, flags=re.DOTALL) is not None
    return RewardResult(reward=float(matched), success=matched)
