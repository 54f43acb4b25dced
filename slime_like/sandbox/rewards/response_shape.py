"""Rewards for the form of a response, and for its length."""

import re

from slime_like.interfaces.reward import RewardResult


def response_format(prompt: str, response: str, answer: str, *, pattern: str) -> RewardResult:
    """1 where the whole response matches the regular expression ``pattern``, else 0.

    Args:
        pattern: in Python's syntax; ``.`` matches line breaks too.
    """
    matched = re.fullmatch(pattern, response, flags=re.DOTALL) is not None
    return RewardResult(reward=float(matched), success=matched)


def response_length(prompt: str, response: str, answer: str, *, limit: int, buffer: int = 0) -> RewardResult:
    """0 up to ``limit`` characters, then falling linearly to -1 at ``limit + buffer`` and beyond.

    DAPO's soft overlong punishment (arXiv:2503.14476, equation 13), on characters. Success: up to ``limit``.

    Args:
        limit: characters without penalty.
        buffer: characters over which the penalty grows; 0: all at once.
    """
    excess = len(response) - limit
    if excess <= 0:
        return RewardResult(reward=0.0, success=True)
    return RewardResult(reward=-min(1.0, excess / buffer) if buffer > 0 else -1.0, success=False)
