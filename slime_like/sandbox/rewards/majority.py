"""Reward for agreeing with the rest of the group. It needs no ground truth."""

import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

from slime_like.interfaces.reward import RewardResult, group_reward
from slime_like.sandbox.rewards.response_parts import after_thinking
from slime_like.system.words import boxed

_FRACTION = re.compile(r"\\[dt]?frac\{(\d+)\}\{(\d+)\}")
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3}(?!\d)|/\d+)?")
_MAX_CHARS = 4096
_MAX_DIGITS = 200


@group_reward
def majority(
    prompt: str, responses: Sequence[str], answer: str, *, min_share: float = 0.0, require_answer: bool = True
) -> list[RewardResult]:
    """1 if a response's final answer is the most frequent answer of its group, else 0.

    TTRL (arXiv:2504.16084, equation 2). If several answers are the most frequent, no response is rewarded. The final
    answer is the content of the last ``\\boxed{}``, else the last number. Numbers are compared by value.

    Args:
        prompt, answer: ignored.
        responses: all responses of one group.
        min_share: least share of the most frequent answer.
        require_answer: if false, a response without box and number is its own answer.
    """
    answers = [_final_answer(after_thinking(response, prompt)[-_MAX_CHARS:], require_answer) for response in responses]
    counts = Counter(answer for answer in answers if answer is not None).most_common(2)
    tied = len(counts) == 2 and counts[0][1] == counts[1][1]
    share = counts[0][1] / len(responses) if counts else 0.0
    winner = counts[0][0] if counts and share >= min_share and not tied else None
    wins = [winner is not None and answer == winner for answer in answers]
    return [
        RewardResult(float(won), won, {"answer": answer, "share": share})
        for won, answer in zip(wins, answers, strict=True)
    ]


def _final_answer(response: str, require_answer: bool) -> str | None:
    box, numbers = boxed(response), _NUMBER.findall(response)
    if box is not None:
        return _plain(_FRACTION.sub(r"\1/\2", "".join(box.split())))
    if numbers:
        return _plain(numbers[-1])
    text = " ".join(response.split()).casefold()
    return text if text and not require_answer else None


def _plain(text: str) -> str:
    """Return a number in one spelling, and other text unchanged."""
    if _NUMBER.fullmatch(text) is None or len(text) > _MAX_DIGITS:
        return text
    try:
        return str(Fraction(text.replace(",", "")))
    except (ValueError, ZeroDivisionError):
        return text
