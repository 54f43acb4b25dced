"""Reward functions that hang or fail, imported by reward workers."""

import itertools
import time
import zlib
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


def always_one(prompt: str, response: str, answer: str) -> float:
    """Reward everything alike, so nothing is learned."""
    return 1.0


def fails_often(prompt: str, response: str, answer: str) -> float:
    """Fail on about a third of all responses."""
    if zlib.crc32(response.encode()) % 3 == 0:
        raise RuntimeError("the judge is out of order")
    return float(answer in response)


_calls = itertools.count(1)


def slows_down(prompt: str, response: str, answer: str, quick_calls: int, seconds: float) -> float:
    """Take ``seconds`` for each call of a worker after the first ``quick_calls``."""
    if next(_calls) > quick_calls:
        time.sleep(seconds)
    return float(answer in response)
