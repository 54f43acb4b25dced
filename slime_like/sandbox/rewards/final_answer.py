"""Rewards that compare a response's final answer as text, or as a number."""

import re
from decimal import Decimal

from slime_like.interfaces.reward import RewardResult
from slime_like.sandbox.rewards.response_parts import after_thinking, last_match

NO_MATCH = "no match of the pattern"
_MARKER = "####"
_NUMBER = re.compile(r"[-+]?\$?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,100})(?:\.[0-9]{1,100})?")
# A second value, or arithmetic left undone.
_BETWEEN = r"[-+*/^:;,=x\u00d7\u00f7\u2013]|\*\*|\\(?:times|cdot|div)|and|or|to"
_CONTINUED = re.compile(rf"[ \t]*(?:(?:{_BETWEEN})[ \t]*[-$*(]{{0,4}}\d|\d|\(?or\b[^\n]*\d)|\.\d|[eE][-+]?\d")


def exact_match(
    prompt: str, response: str, answer: str, *, pattern: str | None = None, ignore_case: bool = False
) -> RewardResult:
    r"""1 where the response is ``answer``, but for white space, else 0.

    Args:
        pattern: a regular expression, e.g. ``Answer: (.*)``. Its last match (the first group, if it has one) is
            compared instead of the whole response.
        ignore_case: compare without regard to case.
    """
    found = after_thinking(response) if pattern is None else last_match(pattern, response)
    if found is None:
        return RewardResult(0.0, False, {"reason": NO_MATCH})
    given, wanted = (" ".join(text.split()) for text in (found, answer))
    return _result(given.casefold() == wanted.casefold() if ignore_case else given == wanted)


def gsm8k(prompt: str, response: str, answer: str, *, require_marker: bool = True) -> RewardResult:
    """1 where the number after the response's last ``####`` is the one after ``####`` in ``answer``, else 0.

    For GSM8K's rows (arXiv:2110.14168), and for answers that are numbers. 1,104 equals 1104.0.

    Args:
        require_marker: false takes the last number of a response without ``####``.

    Raises:
        ValueError: ``answer`` has no number there.
    """
    wanted = _NUMBER.match(answer.rpartition(_MARKER)[2].strip().replace("\u2212", "-"))
    if wanted is None:
        raise ValueError(f"the answer {answer[-40:]!r} has no number after {_MARKER}")
    said = after_thinking(response)
    if _MARKER in said:
        last = (
            said.rpartition(_MARKER)[2]
            .strip(" \t\r\n*:$`(")
            .removeprefix("\\boxed{")
            .removeprefix("\\")
            .replace("\u2212", "-")
        )
        found = _NUMBER.match(last)
        if found is not None and _CONTINUED.match(last, found.end()):
            return RewardResult(0.0, False, {"reason": f"more than a number after {_MARKER}"})
    else:
        numbers = [] if require_marker else list(_NUMBER.finditer(said))
        found = numbers[-1] if numbers else None
    if found is None:
        return RewardResult(0.0, False, {"reason": f"no number after {_MARKER}" if require_marker else "no number"})
    return _result(_value(found.group()) == _value(wanted.group()))


def _result(succeeds: bool) -> RewardResult:
    return RewardResult(float(succeeds), succeeds)


def _value(number: str) -> Decimal:
    return Decimal(number.replace(",", "").replace("$", ""))
