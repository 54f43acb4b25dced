"""Rewards that compare a response's final answer as text, as a number, or as a letter."""

import re
from decimal import Decimal

from slime_like.interfaces.reward import RewardResult
from slime_like.sandbox.rewards.response_parts import after_thinking, last_match

NO_MATCH = "no match of the pattern"
_MARKER = "####"
_NUMBER = re.compile(r"[-+]?\$?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]{1,100})(?:\.[0-9]{1,100})?")
# A second value, or arithmetic left undone.
_CONTINUED = re.compile(r"[ \t]*(?:[-+*/^:=\u00d7][ \t]*[\d(]|\d|or\b)|[eE][-+]?\d")
_LETTERS = "ABCDEFGHIJ"
# Repeats are bounded: of several unbounded ones beside each other, a hostile response tries every division.
_STARS, _GAP = r"\*{0,4}", r"\s{0,4}"
_LETTER = rf"{_STARS}\(?([{_LETTERS}])\)?{_STARS}"
_FONT, _MORE = r"\\(?:text|textbf|mathrm|mathbf)\{", r"(?:[.:]|(?<=\)))[^{}]*|\s*\\text\{[^{}]*"
_BOXED_LETTER = re.compile(rf"\\boxed\{{{_GAP}(?:{_FONT})?{_GAP}{_LETTER}(?:[.\s]*|{_MORE})\}}")
_IS = rf"{_STARS}(?i:\s{{1,4}}is)?{_GAP}:?{_GAP}{_STARS}{_GAP}"
_NAMED_LETTERS = [
    re.compile(rf"(?i:{name}){_IS}{_LETTER}(?![\w'])(?!(?<=I)\s[a-z])") for name in ("answer", "choice|option")
]
_ANSWER_TAG = re.compile(r"</?answer>", re.IGNORECASE)
_BARE_LETTER = re.compile(rf"{_LETTER}(?:[).:](?:\s.*)?)?")
_TRUE_LETTER = re.compile(rf"\(?([{_LETTERS}])\)?\.?", re.IGNORECASE)


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
        last = said.rpartition(_MARKER)[2].strip(" \t*:$").removeprefix("\\boxed{").replace("\u2212", "-")
        found = _NUMBER.match(last)
        if found is not None and _CONTINUED.match(last, found.end()):
            return RewardResult(0.0, False, {"reason": f"more than a number after {_MARKER}"})
    else:
        numbers = [] if require_marker else list(_NUMBER.finditer(said))
        found = numbers[-1] if numbers else None
    if found is None:
        return RewardResult(0.0, False, {"reason": f"no number after {_MARKER}" if require_marker else "no number"})
    return _result(_value(found.group()) == _value(wanted.group()))


def multiple_choice(prompt: str, response: str, answer: str) -> RewardResult:
    r"""1 where the response chooses the letter (A to J) of ``answer``, else 0.

    The choice is the last letter in ``\boxed{}``; else the last one called answer, else choice or option; else that of
    the last line: ``(B)``, ``B.``, ``B) Paris``.

    Raises:
        ValueError: ``answer`` is no letter. Numbers begin at 0 in some data sets and at 1 in others.
    """
    wanted = _TRUE_LETTER.fullmatch(answer.strip())
    if wanted is None:
        raise ValueError(f"the answer {answer[:40]!r} is no letter from A to J")
    said = _ANSWER_TAG.sub(" ", after_thinking(response))
    letters = next(filter(None, (each.findall(said) for each in (_BOXED_LETTER, *_NAMED_LETTERS))), [])
    lines = said.strip().splitlines()
    if not letters and lines and (bare := _BARE_LETTER.fullmatch(lines[-1].strip())):
        letters = [bare.group(1)]
    if not letters:
        return RewardResult(0.0, False, {"reason": "no choice found"})
    return _result(letters[-1] == wanted.group(1).upper())


def _result(succeeds: bool) -> RewardResult:
    return RewardResult(float(succeeds), succeeds)


def _value(number: str) -> Decimal:
    return Decimal(number.replace(",", "").replace("$", ""))
