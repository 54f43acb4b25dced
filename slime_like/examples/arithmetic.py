"""Exact arithmetic on untrusted text: a parser with bounds on everything that can grow."""

import re
from collections.abc import Callable, Sequence
from decimal import Decimal, localcontext
from fractions import Fraction
from operator import add, floordiv, mod, mul, sub, truediv

MAX_CHARS = 256
MAX_DEPTH = 32
MAX_BITS = 2048
"""Of a number's numerator and denominator: 616 digits."""
_DIGITS = 12
"""Significant digits of what is no whole number."""

_TOKEN = re.compile(r"\s*(?:(\d+(?:\.\d*)?|\.\d+)|(\*\*|//|[-+*/%^()\u00d7\u00f7\u2212]))")
_OPERATORS = {"+": add, "-": sub, "*": mul, "/": truediv, "//": floordiv, "%": mod}
_SPELLINGS = {"\u00d7": "*", "\u00f7": "/", "\u2212": "-", "^": "**"}


class ArithmeticFault(ValueError):
    """The expression has no value here; the message is for the model that wrote it."""


def evaluate(text: str) -> Fraction:
    """The exact value of an expression of decimal numbers, ``+ - * / // % **`` (or ``^``) and parentheses.

    Operators bind as in Python. Time and memory are bounded by ``MAX_CHARS``, ``MAX_DEPTH`` and ``MAX_BITS``.
    Raises ``ArithmeticFault`` where there is no value, or a bound is exceeded.
    """
    if len(text) > MAX_CHARS:
        raise ArithmeticFault("too long")
    try:
        return _Parser(_tokens(text)).whole()
    except ZeroDivisionError:
        raise ArithmeticFault("division by zero") from None


def to_text(value: Fraction) -> str:
    """A whole number in full, anything else to twelve significant digits."""
    if value.denominator == 1:
        return str(value.numerator)
    with localcontext(prec=_DIGITS):
        return f"{(Decimal(value.numerator) / Decimal(value.denominator)).normalize():g}"


def _tokens(text: str) -> list[str]:
    tokens, position = [], 0
    while position < len(text.rstrip()):
        match = _TOKEN.match(text, position)
        if match is None:
            raise ArithmeticFault(f"unexpected {text[position:].lstrip()[:1]!r}")
        tokens.append(match[1] or _SPELLINGS.get(match[2], match[2]))
        position = match.end()
    return tokens


class _Parser:
    """Recursive descent; ``depth`` counts everything that nests, signs and powers included."""

    def __init__(self, tokens: list[str]) -> None:
        self._tokens = tokens
        self._at = 0

    def whole(self) -> Fraction:
        value = self._sum(0)
        if self._at < len(self._tokens):
            raise ArithmeticFault(f"unexpected {self._tokens[self._at]!r}")
        return value

    def _sum(self, depth: int) -> Fraction:
        return self._chain(("+", "-"), self._product, depth)

    def _product(self, depth: int) -> Fraction:
        return self._chain(("*", "/", "//", "%"), self._signed, depth)

    def _chain(self, operators: Sequence[str], operand: Callable[[int], Fraction], depth: int) -> Fraction:
        value = operand(depth)
        while (sign := self._take(*operators)) is not None:
            value = _bounded(Fraction(_OPERATORS[sign](value, operand(depth))))
        return value

    def _signed(self, depth: int) -> Fraction:
        if depth > MAX_DEPTH:
            raise ArithmeticFault("nested too deeply")
        sign = self._take("+", "-")
        if sign is None:
            return self._power(depth)
        value = self._signed(depth + 1)
        return -value if sign == "-" else value

    def _power(self, depth: int) -> Fraction:
        base = self._atom(depth)
        return _power(base, self._signed(depth + 1)) if self._take("**") else base

    def _atom(self, depth: int) -> Fraction:
        if self._at == len(self._tokens):
            raise ArithmeticFault("incomplete")
        token = self._tokens[self._at]
        self._at += 1
        if token == "(":
            value = self._sum(depth + 1)
            if self._take(")") is None:
                raise ArithmeticFault("a parenthesis is not closed")
            return value
        if not (token[0].isdigit() or token[0] == "."):
            raise ArithmeticFault(f"unexpected {token!r}")
        return _bounded(Fraction(token))

    def _take(self, *wanted: str) -> str | None:
        if self._at < len(self._tokens) and self._tokens[self._at] in wanted:
            self._at += 1
            return self._tokens[self._at - 1]
        return None


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise ArithmeticFault("the exponent must be an integer")
    if base == 0 and exponent < 0:
        raise ZeroDivisionError
    if abs(base) in (0, 1):
        return Fraction(1) if exponent == 0 else base if exponent % 2 else abs(base)
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if (bits - 1) * abs(exponent) > MAX_BITS:  # before it is computed
        raise ArithmeticFault("too large")
    return _bounded(base**exponent.numerator)


def _bounded(value: Fraction) -> Fraction:
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise ArithmeticFault("too large")
    return value
