"""Rewards that compare a response's final answer as text, number or letter, and rewards for its form and length."""

import json
import re
from collections.abc import Callable
from decimal import Decimal
from functools import wraps
from typing import Any, TypeVar, cast

from slime_like.interfaces.reward import RewardResult
from slime_like.sandbox.rewards.response_parts import after_thinking, last_match, with_opening
from slime_like.system.words import boxed

Function = TypeVar("Function", bound=Callable[..., RewardResult])

NO_MATCH = "no match of the pattern"
_MARKER = "####"
_NUMBER = re.compile(r"[-+]?\$?(?:(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,4}(?!\d))?", re.ASCII)
# A second value, or arithmetic left undone.
_BETWEEN = r"[-+*/^:;,=x\u00d7\u00f7\u2013]|\*\*|\\(?:times|cdot|div)|and|or|to"
_CONTINUED = re.compile(rf"[ \t]*(?:(?:{_BETWEEN})[ \t]*[-$*(]{{0,4}}\d|\d|\(?or\b[^\n]*\d)|\.\d|[eE][-+]?\d")
_TRUE_LETTER = re.compile(r"\(?([A-J])\)?\.?", re.IGNORECASE)
_LETTER = re.compile(
    r"(?:[^\w?]|text(?:bf)?|math(?:rm|bf))*(?<!\w)([A-J])(?:[^\w?]*|[).:]+\s+(?!or\b|and\b)\w{2}.*)", re.DOTALL
)
"""A letter surrounded only by markup, or in front of its option's text (``B) Paris``)."""
_ANSWER = re.compile(
    r"(?:<answer>|(?:^[^\w\n]*|\bthe\s)(?:final |correct |best )?answer(?:[^\w\n]*:|\s+is\b))"
    r"((?:(?!</answer>|the (?:\w+ )?answer).)*)",
    re.IGNORECASE | re.MULTILINE,
)


def any_answer(function: Function) -> Function:
    """Let ``answer`` be a JSON list of texts, as rows with several right answers have. The best result counts."""

    @wraps(function)
    def best(prompt: str, response: str, answer: str, **options: Any) -> RewardResult:
        results = [function(prompt, response, right, **options) for right in _right_answers(answer)]
        return max(results, key=lambda result: (result.reward, result.success))

    return cast(Function, best)


def _right_answers(answer: str) -> list[str]:
    try:
        found = json.loads(answer) if answer.startswith('["') else None
    except ValueError:
        found = None
    return found if isinstance(found, list) and all(isinstance(one, str) for one in found) else [answer]


@any_answer
def exact_match(
    prompt: str, response: str, answer: str, *, pattern: str | None = None, ignore_case: bool = False
) -> RewardResult:
    r"""1 if the response equals ``answer`` up to white space, else 0.

    Args:
        pattern: a regular expression, e.g. ``Answer: (.*)``. Its last match, or that match's first group, is compared.
        ignore_case: ignore case.
    """
    found = after_thinking(response, prompt) if pattern is None else last_match(pattern, response, prompt)
    if found is None:
        return RewardResult(0.0, False, {"reason": NO_MATCH})
    given, wanted = (" ".join(text.split()) for text in (found, answer))
    return _result(given.casefold() == wanted.casefold() if ignore_case else given == wanted)


@any_answer
def gsm8k(prompt: str, response: str, answer: str, *, require_marker: bool = True) -> RewardResult:
    """1 if the number after the response's last ``####`` equals the number after ``####`` in ``answer``, else 0.

    For rows of GSM8K (arXiv:2110.14168), and for answers that are numbers.

    Args:
        require_marker: if false, a response without ``####`` gives its last number.

    Raises:
        ValueError: ``answer`` has no number there.
    """
    wanted = _NUMBER.match(answer.rpartition(_MARKER)[2].strip().replace("\u2212", "-"))
    if wanted is None:
        raise ValueError(f"the answer {answer[-40:]!r} has no number after {_MARKER}")
    said = after_thinking(response, prompt)
    if _MARKER in said:
        last = said.rpartition(_MARKER)[2].strip(" \t\r\n*:$`(").removeprefix("\\boxed{").removeprefix("\\")
        last = last.replace("\u2212", "-")
        found = _NUMBER.match(last)
        if found is not None and _CONTINUED.match(last, found.end()):
            return RewardResult(0.0, False, {"reason": f"more than a number after {_MARKER}"})
    else:
        numbers = [] if require_marker else list(_NUMBER.finditer(said))
        found = numbers[-1] if numbers else None
    if found is None:
        return RewardResult(0.0, False, {"reason": f"no number after {_MARKER}" if require_marker else "no number"})
    return _result(_value(found.group()) == _value(wanted.group()))


@any_answer
def multiple_choice(prompt: str, response: str, answer: str) -> RewardResult:
    r"""1 if the response chooses the letter (A to J) of ``answer``, else 0.

    The choice is the content of the last ``\boxed{}``; else what follows the last ``Answer:``, ``the answer is`` or
    ``<answer>`` on its line; else the whole response. It must be one capital letter, alone or in front of its option's
    text (``B) Paris``).

    Raises:
        ValueError: ``answer`` is not a letter. Numbers start at 0 in some data sets and at 1 in others.
    """
    wanted = _TRUE_LETTER.fullmatch(answer.strip())
    if wanted is None:
        raise ValueError(f"the answer {answer[:40]!r} is not a letter from A to J")
    said = after_thinking(response, prompt)
    chosen = boxed(said)
    if chosen is None:
        chosen = (_ANSWER.findall(said) or [said])[-1]
    letter = _LETTER.fullmatch(chosen)
    if letter is None:
        return RewardResult(0.0, False, {"reason": "no choice found"})
    return _result(letter[1] == wanted[1].upper())


def response_format(prompt: str, response: str, answer: str, *, pattern: str) -> RewardResult:
    """1 if the whole response matches the regular expression ``pattern``, else 0.

    Args:
        pattern: in Python's syntax; ``.`` matches line breaks too.
    """
    return _result(re.fullmatch(pattern, with_opening(response, prompt), flags=re.DOTALL) is not None)


def response_length(prompt: str, response: str, answer: str, *, limit: int, buffer: int = 0) -> RewardResult:
    """0 up to ``limit`` characters, then falling linearly to -1 at ``limit + buffer`` and beyond.

    DAPO's soft overlong punishment (arXiv:2503.14476, equation 13), on characters. Success: up to ``limit``.

    Args:
        limit: characters without penalty.
        buffer: characters over which the penalty grows; 0: immediately.
    """
    excess = len(response) - limit
    if excess <= 0:
        return RewardResult(reward=0.0, success=True)
    return RewardResult(reward=-min(1.0, excess / buffer) if buffer > 0 else -1.0, success=False)


def _result(succeeds: bool) -> RewardResult:
    return RewardResult(float(succeeds), succeeds)


def _value(number: str) -> Decimal:
    return Decimal(number.replace(",", "").replace("$", ""))
