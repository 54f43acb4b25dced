"""Reward of reasoning-gym: each task judges an answer by its own rules."""

import json
import re
from typing import Any

from slime_like.interfaces.reward import RewardResult


def reasoning_gym(prompt: str, response: str, answer: str, *, tag: str | None = "answer") -> RewardResult:
    """The score from 0 to 1 that the row's task gives; success is the full score.

    For rows of ``slime-like make-tasks``.

    Args:
        tag: the last ``<tag>...</tag>`` is judged, and a response without it gets 0; none: all of the response.

    Raises:
        ValueError: ``answer`` is not of such a row.
    """
    entry = _entry(answer)
    given: str | None = response.strip()
    if tag is not None:
        found = re.findall(rf"<{re.escape(tag)}>(.*?)</{re.escape(tag)}>", response, re.DOTALL)
        given = found[-1].strip() if found else None
    if given is None:
        return RewardResult(0.0, False, {"reason": f"no <{tag}>"})
    from reasoning_gym.factory import get_score_answer_fn

    try:
        score = float(get_score_answer_fn(entry["task"])(given, entry))
    except MemoryError:
        raise
    except Exception as error:  # of whatever class: judges expect an answer of their form, and the row itself is sound
        reason = f"not judged ({type(error).__name__})"
        return RewardResult(0.0, False, {"reason": reason, "task": entry["task"]})
    return RewardResult(score, score >= 1.0, {"task": entry["task"]})


def _entry(answer: str) -> dict[str, Any]:
    try:
        entry = json.loads(answer)
        if not isinstance(entry, dict) or not {"task", "question", "answer", "metadata"} <= entry.keys():
            raise ValueError("it lacks a task's fields")
    except ValueError as error:
        raise ValueError(f"the answer {answer[:40]!r} is not of a row of `slime-like make-tasks` ({error})") from error
    return entry
