"""Penalty for a long response."""

from slime_like.interfaces.reward import RewardResult


def response_length(prompt: str, response: str, answer: str, *, limit: int, buffer: int = 0) -> RewardResult:
    """0 up to ``limit`` characters, then falling linearly to -1 at ``limit + buffer`` and beyond.

    The soft overlong punishment of DAPO (arXiv 2503.14476, equation 13), on characters in place of tokens.
    """
    excess = len(response) - limit
    if excess <= 0:
        return RewardResult(reward=0.0, success=True)
    return RewardResult(reward=-min(1.0, excess / buffer) if buffer > 0 else -1.0, success=False)
