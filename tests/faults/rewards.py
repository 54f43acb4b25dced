"""Reward functions that hang or fail, for the reward workers to import."""

import time
from pathlib import Path

from slime_like.interfaces.reward import RewardResult


def hangs_once(prompt: str, response: str, answer: str, marker: str) -> RewardResult:
    """The first call with a response that lacks the answer never returns; ``marker`` is the file that remembers it."""
    if answer not in response and not Path(marker).exists():
        Path(marker).touch()
        while True:
            time.sleep(1)
    return RewardResult(reward=float(len(response)), success=False)


def fails_once_saved(prompt: str, response: str, answer: str, file: str) -> RewardResult:
    """Works until ``file`` is there and has not been written to for four seconds, in which the disk may take it."""
    if Path(file).exists():
        while (left_s := Path(file).stat().st_ctime + 4 - time.time()) > 0:
            time.sleep(left_s)
        raise RuntimeError("the run is to end here")
    return RewardResult(reward=float(len(response)), success=False)
