r"""Comparison of the final answer with the ground truth, by Hugging Face's math-verify.

Responses are untrusted. They are cut to a length, and rejected beyond a nesting depth, before anything parses them. The
worker's limits end whatever still takes too much time or memory.
"""

import logging
import re
from collections.abc import Iterable
from decimal import Decimal
from functools import lru_cache
from itertools import accumulate
from typing import Any

from slime_like.interfaces.user_code import RewardResult
from slime_like.sandbox.rewards.answers import after_thinking, any_answer
from slime_like.system.words import extract_boxed

# Both functions would warn that their alarm is off. The pool bounds the time instead.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_MAX_DEPTH = 24
_NESTING = dict.fromkeys("([{", 1) | dict.fromkeys(")]}", -1)
_MAX_ANSWER_CHARS = 1024
_ROUNDED, _SAME = "1e-5", 1e-12
"""Shares of the larger value: the error of a decimal for a number that no decimal equals, and of evaluation."""
_SCIENTIFIC = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?[eE][-+]?\d{1,3}(?!\w)")
_WORDS = re.compile(r"[^\W\d_]+(?: [^\W\d_]+)*")
_INTEGER = re.compile(r"-?[0-9]{1,18}")
# LaTeX's dollar sign, a dollar sign in front of a number, and a negative space do not change a number's value.
_MONEY = re.compile(r"(?<!\\)\\[$!]|^\$(?=[\d.,]+$)")
_THIN_SPACE = re.compile(r"(?<=\d)(?:\\[,;: ]|~)(?=\d{3}(?!\d))")
# Tags, Markdown and quotes around a number, a missing space after "Answer:", a list's dash. `2**3` is a power.
_MARKUP = re.compile(
    r"""</?[A-Za-z][\w-]{0,30}>|(?<![\w)}])["'`*#~]+(?=\S)|(?<=\S)["'`*#~]+(?![\w({-])|(?<=[A-Za-z]:)(?=[-\d.])"""
    r"""|^\s*-\s""",
)
_LATEX = re.compile(r"\$|\\[\[(]")
_NO_EXPRESSION = re.compile(r"[^\W\d_]{2}|[^ -~]|\d +\d")
# A sum, a difference or a product. A leading sign and a power of ten (1.5 \times 10^3) are not.
_ARITHMETIC = re.compile(r"(?<=[\w)}])\s*[+\-]|(?:\*(?!\*)|\u00d7|\\cdot|\\times)(?!\s*10\s*(?:\^|\*\*))")
# Degrees and powers of ten are neither.
_QUOTIENT_OR_POWER = re.compile(r"\d\s*/\s*\d|\\[dt]?frac|(?<!(?<!\d)10)(?<!(?<!\d)10\s)(?:\^|\*\*)\s*\{?\d")
_SYMBOL = re.compile(r"\s*[A-Za-z]?(?:_\{?\w\}?)?\s*")


@any_answer
def math_verify(
    prompt: str,
    response: str,
    answer: str,
    *,
    max_chars: int = 4096,
    require_boxed: bool = False,
    allow_arithmetic: bool = False,
) -> RewardResult:
    r"""1 if the response's final answer equals ``answer``, else 0.

    Numbers, expressions, sets, tuples and intervals are compared by value, and an answer of words as text. The final
    answer is the last ``\boxed{}``, else the last LaTeX between delimiters such as dollar signs. Otherwise it is read
    from the last line with a digit: the whole line if it has no words, else its last number.

    Integers, fractions and decimals are exact: 0.333 is neither 1/3 nor 0.3330001. Only a decimal for a number that no
    decimal equals, such as 1/3 or a root of 2, may differ by 1e-5 of the larger one, at every magnitude.

    Args:
        max_chars: characters parsed, from the response's end.
        require_boxed: no reward without ``\boxed{}``.
        allow_arithmetic: accept ``12+34`` for 46, which a model can copy from the question.

    Raises:
        ValueError: the ground truth itself cannot be parsed.
    """
    ended = after_thinking(response, prompt).rstrip()
    tail = ended[-max_chars:]
    pieces = tail.split(maxsplit=1)  # the tail starts at white space, so no number is cut in two
    if len(tail) < len(ended) and len(pieces) == 2 and not ended[-max_chars - 1].isspace():
        tail = pieces[1]
    metadata: dict[str, Any] = {"cut_chars": len(ended) - len(tail)} if len(tail) < len(ended) else {}
    reason = _why_wrong(_normalized(tail), _normalized(answer), require_boxed, allow_arithmetic)
    if reason is not None:
        metadata["reason"] = reason
    return RewardResult(reward=float(reason is None), success=reason is None, metadata=metadata)


def _why_wrong(response: str, answer: str, require_boxed: bool, allow_arithmetic: bool) -> str | None:
    box = extract_boxed(response)
    if require_boxed and (box is None or "\\boxed" not in response):
        return "not boxed"
    if _depth(response) > _MAX_DEPTH:
        return "nested too deeply"
    if _WORDS.fullmatch(answer):
        return None if _words(response if box is None else box) == _words(answer) else "wrong"
    if _INTEGER.fullmatch(answer) and _INTEGER.fullmatch(response):
        return None if int(answer) == int(response) else "wrong"
    from math_verify import parse, verify  # imports sympy, which the driver does not need

    truth = _ground_truth(answer)
    given = parse(_final_answer(response) if box is None else _in_box(box), parsing_timeout=None)
    if not given:
        return "no answer found"
    if not allow_arithmetic and _is_undone(str(given[-1]), answer, truth[0]):
        return "arithmetic left undone"
    same = _same(truth[0], given[0])
    return None if same or (same is None and verify(truth, given, timeout_seconds=None)) else "wrong"


@lru_cache(maxsize=4096)
def _ground_truth(answer: str) -> Any:
    """Parse delimited LaTeX as it is, and everything else inside a box."""
    if len(answer) > _MAX_ANSWER_CHARS or _depth(answer) > _MAX_DEPTH:
        raise ValueError(f"the ground truth {answer[:40]!r}... is too long or nested too deeply")
    from math_verify import parse

    delimited = "$" in answer or "\\boxed" in answer
    parsed = parse(answer if delimited else _in_box(answer), parsing_timeout=None)
    if not parsed:
        raise ValueError(f"the ground truth {answer!r} is not a mathematical expression")
    return parsed


def _final_answer(response: str) -> str:
    """Return the part of a response without a box that math-verify is to read the answer from."""
    if _LATEX.search(response):
        return _MARKUP.sub(" ", response)
    # One line: math-verify would read "x > 2." and "-9/5" on the next line as a difference.
    line = next((line for line in reversed(response.splitlines()) if any(map(str.isdigit, line))), response)
    line = _MARKUP.sub(" ", line).strip().rstrip(".!")
    return line if _NO_EXPRESSION.search(line) else _in_box(line)


def _is_undone(given: str, answer: str, truth: Any) -> bool:
    """Return whether a rational number is given as a sum, difference or product, or an integer as a quotient or power.

    A ground truth of the same form allows it.
    """
    is_integer, is_rational = (getattr(truth, f"is_{kind}", False) for kind in ("Integer", "Rational"))
    undone = [_ARITHMETIC] * (is_rational or getattr(truth, "is_Float", False)) + [_QUOTIENT_OR_POWER] * is_integer
    sides = [side for side in given.split("=") if not _SYMBOL.fullmatch(side)]
    return any(all(map(form.search, sides)) and form.search(answer) is None for form in undone)


def _same(truth: Any, given: Any) -> bool | None:
    """Compare two numbers. Return ``None`` if math-verify must compare: exact expressions, and what is not a number.

    It rounds to six decimals, so 6.6e-34 would equal 9.1e-31, also as parts of tuples, intervals, sets and matrices.
    """
    from sympy import Basic, Float, Rational, UnevaluatedExpr

    sides = [getattr(value, "rhs", value) for value in (truth, given)]
    is_equation = any(hasattr(value, "rhs") for value in (truth, given))
    if pairs := [sides] if is_equation else [*zip(_parts(truth), _parts(given), strict=False)]:
        return False if any(_same(*pair) is False for pair in pairs) else None
    has_decimal = any(isinstance(side, Basic) and side.atoms(Float) for side in sides)
    if has_decimal:  # percentages are products that are not evaluated
        sides = [side.doit() if isinstance(side, Basic) and side.atoms(UnevaluatedExpr) else side for side in sides]
    if not all(getattr(side, "is_comparable", False) for side in sides):
        return None
    if not has_decimal:
        return None if _near(map(_evaluated, sides), _SAME) else False
    exact = [side.xreplace({one: Rational(str(one)) for one in side.atoms(Float)}) for side in sides]
    if not all(side.is_Rational for side in exact):
        return _near(map(_evaluated, exact), Rational(_ROUNDED))
    are_decimals = all(10 ** side.q.bit_length() % side.q == 0 for side in exact)
    return bool(exact[0] == exact[1]) if are_decimals else _near(exact, Rational(_ROUNDED))


def _near(values: Iterable[Any], share: Any) -> bool:
    first, second = values
    largest = max(abs(first), abs(second))
    return bool(first == second or (largest.is_finite and abs(first - second) <= share * largest))


def _parts(value: Any) -> list[Any]:
    if getattr(value, "is_FiniteSet", False):
        return sorted(value, key=_evaluated) if all(part.is_comparable for part in value) else []
    if getattr(value, "is_Matrix", False):
        return list(value.flat())
    return list(value.args) if type(value).__name__ in ("Tuple", "Interval") else []


def _evaluated(number: Any) -> Any:
    try:
        return number.evalf(strict=True)
    except ArithmeticError:  # sympy's PrecisionExhausted, as for sqrt(2)^2 - 2: every digit cancels
        return number.evalf(chop=1e-60)


def _depth(text: str) -> int:
    return max(accumulate((_NESTING.get(character, 0) for character in text), initial=0))


def _normalized(text: str) -> str:
    """Write numbers as math-verify reads them: ``1e3`` as ``1000`` (it would read 1), a minus sign as a hyphen."""
    text = _THIN_SPACE.sub("", _MONEY.sub("", text.replace("\u2212", "-").strip())).strip()
    # 1.5e3 is rounded and becomes 1500.0, but 1500 is exact.
    return _SCIENTIFIC.sub(lambda m: (plain := f"{Decimal(m[0]):f}") + ".0" * ("." in m[0] and "." not in plain), text)


def _in_box(text: str) -> str:
    return f"\\boxed{{{text.rstrip('.')}}}"


def _words(text: str) -> str:
    return text.removeprefix("\\text{").strip(" \t\r\n.()*{}").casefold()
