"""Reward of reasoning-gym, where each task judges an answer by its own rules."""

import json
from typing import Any

from slime_like.interfaces.reward import RewardResult
from slime_like.sandbox.rewards.response_parts import after_thinking, last_match
from slime_like.sandbox.rewards.text_answer import NO_MATCH


def reasoning_gym(
    prompt: str, response: str, answer: str, *, pattern: str | None = "(?s)<answer>(.*?)</answer>"
) -> RewardResult:
    """The score from 0 to 1 that the row's task gives; success is the full score.

    For rows of ``slime-like make-tasks``.

    Args:
        pattern: as for ``exact_match``; none: the whole response is judged.

    Raises:
        ValueError: ``answer`` is not from such a row.
    """
    from reasoning_gym.factory import get_score_answer_fn  # imports all tasks, which takes seconds

    entry = _entry(answer)
    given = after_thinking(response, prompt) if pattern is None else last_match(pattern, response, prompt)
    if given is None:
        return RewardResult(0.0, False, {"reason": NO_MATCH})
    try:
        score = float(get_score_answer_fn(entry["task"])(given.strip(), entry))
    except MemoryError:
        raise
    except Exception as error:  # judges raise anything for answers of another form; the row itself is sound
        reason = f"not judged ({type(error).__name__})"
        return RewardResult(0.0, False, {"reason": reason, "task": entry["task"]})
    return RewardResult(score, score >= 1.0, {"task": entry["task"]})


def _entry(answer: str) -> dict[str, Any]:
    try:
        entry = json.loads(answer)
        if not isinstance(entry, dict) or not {"task", "question", "answer", "metadata"} <= entry.keys():
            raise ValueError("it lacks a task's fields")
    except ValueError as error:
        raise ValueError(
            f"the answer {answer[:40]!r} is not from a row of `slime-like make-tasks` ({error})"
        ) from error
    return entry
