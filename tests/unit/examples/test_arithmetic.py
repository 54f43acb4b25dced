"""The calculator's parser: Python's own arithmetic is the judge of what is right."""

import random
import re
from fractions import Fraction

import pytest

from slime_like.examples.arithmetic import MAX_BITS, MAX_CHARS, MAX_DEPTH, ArithmeticFault, evaluate, to_text
from slime_like.examples.calculator import Calculator
from slime_like.interfaces import Task


class F(Fraction):
    """Python's operators on exact numbers, for ``eval`` of expressions that this file made itself."""


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


def test_values_are_those_of_python_on_exact_numbers() -> None:
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
            except ArithmeticFault as fault:  # a larger number on the way
                assert str(fault) in ("too large", "too long"), text
                continue
            compared += 1
    assert compared > 1500


@pytest.mark.parametrize(
    ("text", "shown"),
    [("2^10", "1024"), ("2**3**2", "512"), ("-2**2", "-4"),
     ("7\u00d78\u00f72\u22121", "27"), (" ( 1 + 2 ) * 3 ", "9"), (".5+.5", "1"),
     ("(-1)**999999999999", "-1"), ("1**10000000000", "1"), ("0**0", "1"),
     ("2**70", "1180591620717411303424"), ("1/3", "0.333333333333"), ("7/2", "3.5"), ("-1/8", "-0.125"),
     ("1/1024/1024/1024", "9.31322574615e-10")],
)  # fmt: skip
def test_spellings_binding_and_values_as_text(text: str, shown: str) -> None:
    assert to_text(evaluate(text)) == shown


@pytest.mark.parametrize(
    "text",
    ["9**9**9**9", "2**100000000000000000000", "10**600*10**600", "1/3**2000", "(" * 200 + "1" + ")" * 50,
     "-" * 200 + "1", "2**" * 80 + "2", "1" * (MAX_CHARS + 1), "2**0.5", "1/0", "5%0", "0**-1", "__import__('os')",
     "1 2", "", "(1", "1+", ")"],
    ids=lambda text: text[:16],
)  # fmt: skip
def test_what_has_no_value_is_rejected_at_once(text: str) -> None:
    """Unbounded, the first of them would take for ever, and end the test by its time limit."""
    with pytest.raises(ArithmeticFault):
        evaluate(text)


def test_depth_and_size_are_allowed_up_to_their_bounds() -> None:
    assert evaluate("(" * MAX_DEPTH + "1" + ")" * MAX_DEPTH) == 1
    assert evaluate(f"2**{MAX_BITS - 1}") == 2 ** (MAX_BITS - 1)
    with pytest.raises(ArithmeticFault):
        evaluate(f"2**{MAX_BITS}")


def test_a_conversation_with_the_calculator() -> None:
    calculator = Calculator(opening="[", closing="]")
    state = calculator.reset(Task("6*7+1=", "43"))
    first = calculator.step(state, "Let me see: [6*7]")
    assert (first.observation, first.done, first.reward) == ("42", False, 0.0)
    second = calculator.step(first.state, "[42+")  # not closed: taken for the answer
    assert (second.done, second.success) == (True, False)
    wrong = calculator.step(first.state, "[42+*1]")
    assert wrong.observation == "error: unexpected '*'" and not wrong.done
    last = calculator.step(wrong.state, " 43.0 ")
    assert (last.done, last.reward, last.success, last.metadata["calls"]) == (True, 1.0, True, 2)
