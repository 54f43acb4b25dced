"""Reward functions that hang, for the reward workers to import."""

from __future__ import annotations

import time
from pathlib import Path

from slime_like.rewards.result import RewardResult


def hangs_once(prompt: str, response: str, answer: str, marker: str) -> RewardResult:
    """The first call of all never returns; ``marker`` is the file that remembers it."""
    if not Path(marker).exists():
        Path(marker).touch()
        hangs_always(prompt, response, answer)
    return RewardResult(reward=float(len(response)), success=False)


def hangs_always(prompt: str, response: str, answer: str) -> RewardResult:
    while True:
        time.sleep(1)
