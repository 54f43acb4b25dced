"""Reward functions that hang or fail, imported by reward workers."""

import time
from pathlib import Path

from slime_like.interfaces.user_code import RewardResult


def hangs_once(prompt: str, response: str, answer: str, marker: str) -> RewardResult:
    """Hang in the first call with a wrong response. The file ``marker`` records that it happened."""
    if answer not in response and not Path(marker).exists():
        Path(marker).touch()
        while True:
            time.sleep(1)
    return RewardResult(reward=float(len(response)), success=False)


def fails_once_saved(prompt: str, response: str, answer: str, file: str) -> RewardResult:
    """Fail once ``file`` exists and has not changed for four seconds, in which it is written to disk."""
    if Path(file).exists():
        while (left_s := Path(file).stat().st_ctime + 4 - time.time()) > 0:
            time.sleep(left_s)
        raise RuntimeError("the run is to end here")
    return RewardResult(reward=float(len(response)), success=False)
