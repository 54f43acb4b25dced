"""A calculator that the model may use before it answers, with exact arithmetic on untrusted text."""

import ast
import re
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal, localcontext
from fractions import Fraction
from operator import add, floordiv, mod, mul, sub, truediv
from typing import Any

from slime_like.interfaces import Step, Task

MAX_CHARS = 256
MAX_BITS = 2048
"""Limit on a number's numerator and denominator: 616 decimal digits."""
_DIGITS = 12
"""Significant digits of numbers that are not integers."""

_SPELLINGS = str.maketrans({"\u00d7": "*", "\u00f7": "/", "\u2212": "-", "^": "**"})
_CHARACTERS = re.compile(r"[-+*/%(). \d]*", re.ASCII)
_LEADING_ZEROS = re.compile(r"(?<![\d.])0+(?=\d)")  # Python rejects 007
_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: add, ast.Sub: sub, ast.Mult: mul, ast.Div: truediv, ast.FloorDiv: floordiv, ast.Mod: mod
}  # fmt: skip


class ArithmeticFault(ValueError):
    """An expression without a value. The message is for the model that wrote it."""


class Calculator:
    """Environment that evaluates the expression between ``opening`` and ``closing``. A turn without one is the answer.

    If a turn has several expressions, the last one counts. If it has no value, the observation gives the reason, and
    the model may try again. The reward is 1 if the answer is a number equal to the row's answer, else 0.
    """

    def __init__(self, opening: str = "<calculate>", closing: str = "</calculate>") -> None:
        if not opening or not closing:
            raise ValueError(f"opening={opening!r} and closing={closing!r} must not be empty")
        self._opening = opening
        self._closing = closing

    def reset(self, task: Task) -> Any:
        return {"answer": task.answer, "calls": 0}

    def step(self, state: Any, response: str) -> Step:
        response = response.rpartition("</think>")[2].partition("<think>")[0]  # expressions in thinking are drafts
        _, opened, after = response.rpartition(self._opening)
        expression, closed, _ = after.partition(self._closing)
        calls = state["calls"]
        if not (opened and closed):
            success = False
            with suppress(ArithmeticFault):
                success = evaluate(response) == evaluate(state["answer"])
            return Step(done=True, reward=float(success), success=success, metadata={"calls": calls})
        try:
            observation = to_text(evaluate(expression))
        except ArithmeticFault as fault:
            observation = f"error: {fault}"
        return Step(
            {**state, "calls": calls + 1},
            observation,
            metadata={"expression": expression[:80], "observation": observation[:80]},
        )


def evaluate(text: str) -> Fraction:
    """Return the exact value of an expression of decimal numbers, ``+ - * / // % **`` (or ``^``) and parentheses.

    Operators bind as in Python, which parses the text; nothing is executed. ``MAX_CHARS`` and ``MAX_BITS`` bound time
    and memory. Raises ``ArithmeticFault`` if there is no value, or a limit is exceeded.
    """
    if len(text) > MAX_CHARS:
        raise ArithmeticFault("too long")
    text = _LEADING_ZEROS.sub("", " ".join(text.translate(_SPELLINGS).split()))
    if not _CHARACTERS.fullmatch(text):
        raise ArithmeticFault("not an arithmetic expression")
    try:
        return _value(ast.parse(text, mode="eval").body, text)
    except (SyntaxError, RecursionError, MemoryError):
        raise ArithmeticFault("not an arithmetic expression") from None
    except ZeroDivisionError:
        raise ArithmeticFault("division by zero") from None


def to_text(value: Fraction) -> str:
    """Return an integer in full, and anything else with twelve significant digits."""
    if value.denominator == 1:
        return str(value.numerator)
    with localcontext(prec=_DIGITS):
        return f"{(Decimal(value.numerator) / Decimal(value.denominator)).normalize():g}"


def _value(node: ast.expr, text: str) -> Fraction:
    match node:
        case ast.Constant(value=int() | float()):
            value = Fraction(text[node.col_offset : node.end_col_offset])  # the float would be rounded
        case ast.UnaryOp(ast.USub() | ast.UAdd() as sign, operand):
            value = _value(operand, text) * (-1 if isinstance(sign, ast.USub) else 1)
        case ast.BinOp(left, ast.Pow(), right):
            value = _power(_value(left, text), _value(right, text))
        case ast.BinOp(left, operator, right) if type(operator) in _OPERATORS:
            value = Fraction(_OPERATORS[type(operator)](_value(left, text), _value(right, text)))
        case _:
            raise ArithmeticFault("not an arithmetic expression")
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ArithmeticFault("too large")
    return value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ArithmeticFault("the exponent must be an integer")
    if base == 0 and exponent < 0:
        raise ZeroDivisionError
    if abs(base) in (0, 1):
        return Fraction(1) if exponent == 0 else base if exponent % 2 else abs(base)
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if (bits - 1) * abs(exponent) > MAX_BITS:  # checked before the power is computed
        raise ArithmeticFault("too large")
    return base**exponent.numerator
