"""Comparison of the final answer with the ground truth, by Hugging Face's math-verify.

What a model wrote is hostile until shown otherwise: it is cut to a length and refused beyond a nesting depth before
anything parses it. What still takes too long or too much memory is ended by the worker's limits.
"""

import logging
import re
from decimal import Decimal
from functools import lru_cache
from itertools import accumulate
from typing import Any

from slime_like.interfaces.reward import RewardResult
from slime_like.sandbox.rewards.response_parts import after_thinking
from slime_like.system.latex import boxed

# Both functions warn that their alarm is off; here the pool bounds the time.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_MAX_DEPTH = 24
_NESTING = dict.fromkeys("([{", 1) | dict.fromkeys(")]}", -1)
_MAX_ANSWER_CHARS = 1024
_SCIENTIFIC = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?[eE][-+]?\d{1,3}(?!\w)")
_WORDS = re.compile(r"[^\W\d_]+(?: [^\W\d_]+)*")
_INTEGER = re.compile(r"-?[0-9]{1,18}")
_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d*)(?:\.\d+)?%?(?<=[\d%])")
# A dollar sign of LaTeX, one before a number, and a negative space: none is part of a number's value.
_MONEY = re.compile(r"(?<!\\)\\[$!]|^\$(?=[\d.,]+$)")
_THIN_SPACE = re.compile(r"(?<=\d)(?:\\[,;: ]|~)(?=\d{3}(?!\d))")
# Markdown's bold: `**` with an operand on both sides is a power.
_BOLD = re.compile(r"(?<![\w)}])\*\*(?=\S)|(?<=\S)\*\*(?![\w({-])")
# What else may stand around a number alone: a tag, quotes, brackets, a sign of a list or heading, a name's colon.
_TAG = re.compile(r"</?[A-Za-z][\w-]{0,30}>")
_SIGNED = r"(-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?%?)"
_WRAPPED = re.compile(rf"""(?:(?<=[\s:])|^)(?:["'`*#~]+{_SIGNED}["'`*]*|[(\[{{]{_SIGNED}[)\]}}])(?=[\s.,;:!?]|$)""")
_BULLET = re.compile(r"""^\s*-\s+(?=["'`*#~(\[{<])""", re.MULTILINE)
# A line that begins with a sign, or a number, does not go on with what the line before ends with.
_NEXT_LINE = re.compile(r"(?<=\d)([.,;:!?]?)\s*\n\s*(?=[-\d])")
_FULL_STOP = re.compile(r"(/\d{1,3})\.(?=\s|$)")
_AFTER_COLON = re.compile(r"(?<=[A-Za-z]):(?=-?[\d.])")
_PLAIN = r"-?\d+(?:\.\d+)?(?:/\d+)?"
_VALUE = rf"(?:{_PLAIN}|-?(?:oo|inf|infinity|[a-z]))"
_NEXT = r"(?:,?\s(?:or|and)\s|,\s?)"
_NUMBERS = rf"(?:[a-z]\s?=\s?)?{_PLAIN}(?:{_NEXT}{_PLAIN})+"
_NAMED = rf"[a-z]\s?=\s?{_PLAIN}(?:{_NEXT}[a-z]\s?=\s?{_PLAIN})+"
_BRACKETS = rf"[\[({{]\s?{_VALUE}(?:,\s?{_VALUE})+\s?[\])}}]"
_IN_BRACKETS = rf"{_BRACKETS}(?:(?:{_NEXT}|\s?[U\u222a]\s?){_BRACKETS})*"
_THOUSANDS = r"(?!-?\d{1,3}(?:,\d{3})+(?:\.\d+)?[.!]?$)"
# What ends a response in plain text: values in brackets, or a list.
_GROUP = re.compile(
    rf"(?:^|[\s:])(?:(?P<numbers>{_THOUSANDS}{_NUMBERS})|(?P<named>{_NAMED})"
    rf"|(?<!gcd )(?<!lcm )(?<!max )(?<!min )(?P<brackets>{_IN_BRACKETS}))[.!]?$"
)
_GROUP_CHARS = 300
# Begins a sentence in which a number stands before a comma by chance: in 2020, 5.
_ASIDE = re.compile(
    r"(?:(?:and|but|hence|now|so|then|therefore|thus),?\s+)?(?:\w{2,}ing|after|as|at|because|before|by|during|for|from|"
    r"given|if|in|let|on|once|since|suppose|when|where|while|with)\b"
    r"[^.!?;:\n]*$",
    re.IGNORECASE,
)
_LAST_COMMA = re.compile(r",\s?(?!(?:or|and)\s)[^,\s]+(?:\s?=\s?[^,\s]+)?$")
_SENTENCE = re.compile(r"[.!?;:\n]\s+")
_SYMBOL = re.compile(r"\s*[A-Za-z]?(?:_\{?\w\}?)?\s*")
_CONJUNCTION, _UNION = re.compile(r",?\s(?:or|and)\s"), re.compile(r"[U\u222a]\s?")
_VARIABLE, _INFINITY = re.compile(r"[a-z]\s?=\s?"), re.compile(r"\b(?:oo|inf|infinity)\b")
# Plain text that is one expression, without words.
_EXPRESSION = re.compile(r"(?!.*[A-Za-z]{2})[-+*/^=().\w\s]{1,80}")
_BOXED_WORDS = re.compile(r"\\boxed\{(?:\\text\{)?([^{}]*)\}")
# A sum, a difference or a product, but no sign at the front and no power of ten (1.5 \times 10^3).
_ARITHMETIC = re.compile(r"(?<=[\w)}])\s*[+\-\u2212]|(?:\*(?!\*)|\u00d7|\\cdot|\\times)(?!\s*10\s*(?:\^|\*\*))")
# But no degrees, and no power of ten.
_QUOTIENT_OR_POWER = re.compile(r"\d\s*/\s*\d|\\[dt]?frac|(?<!(?<!\d)10)(?<!(?<!\d)10\s)(?:\^|\*\*)\s*\{?\d")


def math_verify(
    prompt: str,
    response: str,
    answer: str,
    *,
    max_chars: int = 4096,
    require_boxed: bool = False,
    allow_arithmetic: bool = False,
) -> RewardResult:
    r"""1 where the response's final answer equals ``answer``, else 0.

    Numbers, expressions, sets, tuples and intervals are compared by value; an answer of words alone as text. The final
    answer is the last ``\boxed{}``, or several beside each other; else the last LaTeX between dollar signs; else the
    last number, or the list, tuple or interval at the end.

    Args:
        max_chars: characters parsed, from the response's end; the metadata reports a cut.
        require_boxed: no reward without ``\boxed{}``.
        allow_arithmetic: accept ``12+34`` for 46; then a model can earn the reward by repeating the question.

    Raises:
        ValueError: the ground truth itself cannot be parsed.
    """
    ended = after_thinking(response).rstrip()
    tail = _tail(ended, max_chars)
    metadata: dict[str, Any] = {"cut_chars": len(ended) - len(tail)} if len(tail) < len(ended) else {}
    reason = _why_wrong(_without_money(tail), _without_money(answer), require_boxed, allow_arithmetic)
    if reason is not None:
        metadata["reason"] = reason
    return RewardResult(reward=float(reason is None), success=reason is None, metadata=metadata)


def _why_wrong(response: str, answer: str, require_boxed: bool, allow_arithmetic: bool) -> str | None:
    box = boxed(response)
    if require_boxed and (box is None or "\\boxed" not in response):
        return "not boxed"
    if _depth(response) > _MAX_DEPTH:
        return "nested too deeply"
    if _WORDS.fullmatch(answer):
        return None if _words(response) == _words(answer) else "wrong"
    bare = response.strip()  # also of what int() takes for no white space, such as the separators "\x1c" to "\x1f"
    if _INTEGER.fullmatch(answer) and _INTEGER.fullmatch(bare):
        return None if int(answer) == int(bare) else "wrong"
    from math_verify import parse, verify  # and sympy with it: the driver looks at the options only, and judges nothing

    reason: str | None = "no answer found"
    # First all boxes that stand beside each other, as a set has them; then the last alone.
    for text in _candidates(response, box):
        parsed = parse(text, parsing_timeout=None)
        if parsed:
            if not allow_arithmetic and _is_undone(str(parsed[-1]), answer):
                reason = "arithmetic left undone"
            elif verify(_ground_truth(answer), parsed, timeout_seconds=None):
                return None
            else:
                reason = "wrong"
    return reason


@lru_cache(maxsize=4096)
def _ground_truth(answer: str) -> Any:
    """Plain numbers and delimited LaTeX parse as they are; bare LaTeX only inside a box."""
    if len(answer) > _MAX_ANSWER_CHARS or _depth(answer) > _MAX_DEPTH:
        raise ValueError(f"the ground truth {answer[:40]!r}... is too long or nested too deeply")
    from math_verify import parse
    from sympy import Integer  # type: ignore[import-untyped]

    if _INTEGER.fullmatch(answer):
        return [Integer(answer), answer]  # what parse would return, at a hundredth of its time
    plain = _plain_decimals(answer)
    delimited = _NUMBER.fullmatch(plain) or "$" in plain or "\\boxed" in plain
    parsed = parse(plain if delimited else f"\\boxed{{{plain}}}", parsing_timeout=None)
    if not parsed:
        raise ValueError(f"the ground truth {answer!r} is not a mathematical expression")
    return parsed


def _is_undone(given: str, answer: str) -> bool:
    """Whether a rational number is given as a sum, difference or product; an integer, as a quotient or power. A ground
    truth that is written so itself may be."""
    truth = _ground_truth(answer)[0]
    is_integer, is_fraction = (getattr(truth, f"is_{kind}", False) for kind in ("Integer", "Rational"))
    undone = [_ARITHMETIC] * (is_fraction or getattr(truth, "is_Float", False)) + [_QUOTIENT_OR_POWER] * is_integer
    sides = [side for side in given.split("=") if not _SYMBOL.fullmatch(side)]
    return any(all(map(form.search, sides)) and form.search(answer) is None for form in undone)


def _tail(text: str, max_chars: int) -> str:
    """The end of the text, from a white space on, so that no number is cut in two."""
    if len(text) <= max_chars:
        return text
    tail = text[-max_chars:]
    pieces = tail.split(maxsplit=1)
    return pieces[1] if len(pieces) == 2 and not text[-max_chars - 1].isspace() else tail


def _depth(text: str) -> int:
    return max(accumulate((_NESTING.get(character, 0) for character in text), initial=0))


def _without_money(text: str) -> str:
    return _THIN_SPACE.sub("", _MONEY.sub("", text.strip())).strip()


def _candidates(response: str, box: str | None) -> list[str]:
    """Texts of which any may be right."""
    spelt_out = _spelt_out(response)
    if box is not None:
        return [spelt_out, f"\\boxed{{{_plain_decimals(box.rstrip('.'))}}}"]
    if "$" not in response and (latex := _group(spelt_out[-_GROUP_CHARS:])):  # whose last number alone would be read
        return [rf"\boxed{{{latex}}}"]
    bare = spelt_out.strip().rstrip(".")
    return [spelt_out, *([f"\\boxed{{{bare}}}"] if _EXPRESSION.fullmatch(bare) else [])]


def _group(text: str) -> str | None:
    """The list, tuple, interval or union at the end, in LaTeX; values of several variables are a tuple."""
    group = _GROUP.search(text)
    if group is None:
        return None
    found = group["numbers"] or group["named"] or group["brackets"]
    ends_with_comma = _LAST_COMMA.search(found) is not None
    if ends_with_comma and not group["brackets"] and _ASIDE.match(_SENTENCE.split(text[: group.start()])[-1].lstrip()):
        return None
    values = _UNION.sub(r"\\cup ", _CONJUNCTION.sub(",", _VARIABLE.sub("", found)))
    if group["named"] and len(set(_VARIABLE.findall(found))) > 1:
        values = f"({values})"
    return _INFINITY.sub(r"\\infty", values).replace("{", r"\{").replace("}", r"\}")


def _spelt_out(response: str) -> str:
    """Without what keeps math-verify from a number: markup, signs around it, a minus sign that is no hyphen."""
    plain = _NEXT_LINE.sub(r"\1;\n", _BULLET.sub("", response.replace("\u2212", "-")))
    plain = _FULL_STOP.sub(r"\1 ;", _TAG.sub(" ", _BOLD.sub("", plain)))
    return _plain_decimals(_AFTER_COLON.sub(": ", _WRAPPED.sub(lambda found: f" {found[1] or found[2]} ", plain)))


def _plain_decimals(text: str) -> str:
    """``1e3`` as ``1000``: math-verify would read it as 1."""
    return _SCIENTIFIC.sub(lambda match: format(Decimal(match.group()), "f"), text)


def _words(text: str) -> str:
    boxed = _BOXED_WORDS.findall(text)
    return (boxed[-1] if boxed else text).strip(" \t\r\n.()*").casefold()
