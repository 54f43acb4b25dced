"""Exact arithmetic, compared with Python's own on fractions."""

import random
import re
from fractions import Fraction

import pytest

from slime_like.examples.calculator import MAX_BITS, MAX_CHARS, ArithmeticFault, Calculator, evaluate, to_text
from slime_like.interfaces import Task


class F(Fraction):
    """Python's operators on exact numbers, for ``eval`` of the expressions made below."""


def expression(rng: random.Random, depth: int = 0) -> str:
    kind = rng.random()
    if depth > 3 or kind < 0.35:
        return rng.choice([str(rng.randint(0, 99)), f"{rng.randint(0, 9)}.{rng.randint(0, 99)}"])
    if kind < 0.45:
        return f"-{expression(rng, depth + 1)}"
    if kind < 0.6:
        return f"({expression(rng, depth + 1)})"
    if kind < 0.68:
        return f"{expression(rng, depth + 1)}**{rng.randint(0, 3)}"
    operator = rng.choice(["+", "-", "*", "/", "//", "%"])
    return f"{expression(rng, depth + 1)} {operator} {expression(rng, depth + 1)}"


def test_values_equal_pythons() -> None:
    rng = random.Random(0)
    compared = 0
    for _ in range(2000):
        text = expression(rng)
        exact = re.sub(r"(?<!\*)(?<!\*\*)\b\d+(?:\.\d+)?", lambda match: f"F('{match.group()}')", text)
        exact = re.sub(r"\*\*F\('(\d+)'\)", r"**\1", exact)
        try:
            expected = Fraction(eval(exact, {"F": F}))
        except ZeroDivisionError:
            with pytest.raises(ArithmeticFault, match="division by zero"):
                evaluate(text)
            continue
        if max(expected.numerator.bit_length(), expected.denominator.bit_length()) <= MAX_BITS:
            try:
                assert evaluate(text) == expected, text
            except ArithmeticFault as fault:  # an intermediate number is larger
                assert str(fault) in ("too large", "too long"), text
                continue
            compared += 1
    assert compared > 1500


@pytest.mark.parametrize(
    ("text", "shown"),
    [("2^10", "1024"), ("2**3**2", "512"), ("-2**2", "-4"), ("007+00.5", "7.5"), ("1+\n1", "2"), ("5.", "5"),
     ("7\u00d78\u00f72\u22121", "27"), (" ( 1 + 2 ) * 3 ", "9"), (".5+.5", "1"), ("(" * 100 + "1" + ")" * 100, "1"),
     ("(-1)**999999999999", "-1"), ("1**10000000000", "1"), ("0**0", "1"), ("-" * 200 + "1", "1"),
     ("2**70", "1180591620717411303424"), ("1/3", "0.333333333333"), ("7/2", "3.5"), ("-1/8", "-0.125"),
     ("1/1024/1024/1024", "9.31322574615e-10"), ("0.1+0.2", "0.3"), ("1+" * 127 + "1", "128")],
)  # fmt: skip
def test_spellings_binding_and_text(text: str, shown: str) -> None:
    assert to_text(evaluate(text)) == shown


@pytest.mark.parametrize(
    "text",
    ["9**9**9**9", "2**100000000000000000000", "10**600*10**600", "1/3**2000", "(" * 255, "(" * 120 + "1",
     "2**" * 80 + "2", "1" * (MAX_CHARS + 1), "2**0.5", "1/0", "5%0", "0**-1", "__import__('os')", "1e5", "0x1", "1j",
     "1 2", "", "(1", "1+", ")", "()", "2(3)", "...", "1_0", "1<2", "+" * 255, "2**" * 85, f"2**{MAX_BITS}"],
    ids=lambda text: text[:16],
)  # fmt: skip
def test_expressions_without_a_value_are_rejected_immediately(text: str) -> None:
    """Without bounds, the first one would run until the test's time limit."""
    with pytest.raises(ArithmeticFault):
        evaluate(text)


def test_the_largest_number_and_drafts_in_thinking() -> None:
    assert evaluate(f"2**{MAX_BITS - 1}") == 2 ** (MAX_BITS - 1)
    calculator = Calculator()
    state = calculator.reset(Task("p", "5"))
    assert calculator.step(state, "<think>perhaps <calculate>2+2</calculate></think>5").reward == 1
    step = calculator.step(state, "<think>or</think><calculate>2+3</calculate>")
    assert (step.done, step.observation) == (False, "5")
    assert calculator.step(state, "<think>perhaps <calculate>2+2</calculate>").done


def test_a_conversation_with_the_calculator() -> None:
    calculator = Calculator(opening="[", closing="]")
    state = calculator.reset(Task("6*7+1=", "43"))
    first = calculator.step(state, "Let me see: [6*7]")
    assert (first.observation, first.done, first.reward) == ("42", False, 0.0)
    second = calculator.step(first.state, "[42+")  # not closed, so it is the answer
    assert (second.done, second.success) == (True, False)
    wrong = calculator.step(first.state, "[42+*1]")
    assert wrong.observation == "error: not an arithmetic expression" and not wrong.done
    last = calculator.step(wrong.state, " 43.0 ")
    assert (last.done, last.reward, last.success, last.metadata["calls"]) == (True, 1.0, True, 2)
