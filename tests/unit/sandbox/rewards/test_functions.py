"""The reward functions themselves, case by case."""

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from slime_like.sandbox.rewards.answers import majority, response_format, response_length
from slime_like.sandbox.rewards.math_answer import math_verify
from slime_like.sandbox.rewards.registry import REGISTERED, resolve_reward, try_options
from tests.support.properties import examples

# ground truth, response
RIGHT = [
    ("46", " 046.\n"), ("46", "12+34=46"), ("46", "The answer is 46."), ("46", "46.0"), ("46", "$46$"),
    ("46", "first 12, then **46**"), ("46", "no 45\n" + "filler " * 2000 + "\nthe answer is 46"), ("46", "46\x1c"),
    ("46", "\x1f46"), ("46", "46\x00"), ("46", r"\boxed{46 = \frac{92}{2}}"), ("46", "It is 46.\nHope it helps!"),
    ("-3", "-3"), ("-5", "it is \u22125"), ("0.5", "1/2"), ("1/3", "0.333333"), ("7/24", "The answer is 7/24."),
    ("1000", "1,000"), ("1,234.5", "1234.5"), ("1e3", "1000"), ("1.5e-2", "0.015"), ("1000", r"$10^3$"),
    ("1500", r"\boxed{1.5 \times 10^3}"), ("10000", r"\boxed{10\,000}"), ("50%", r"\boxed{50\%}"),
    (r"\frac{1}{2}", "0.5"), (r"$\frac12$", r"\boxed{1/2}"), ("3/2", r"\boxed{1\frac{1}{2}}"), (r"\boxed{7}", "7"),
    ("x^2+1", "1+x^2"), (r"2\sqrt{3}", r"\boxed{\sqrt{12}}"), ("x=3", r"\boxed{3}"), ("(2,1)", "(2, 1)"),
    (r"\{1,2\}", r"\boxed{\{2,1\}}"), ("1,2", "2, 1"), ("2,3", r"\boxed{x=2 \text{ or } x=3}"), ("[2,5)", "[2,5)"),
    (r"[2,\infty)", r"\boxed{[2,\infty)}"), (r"(-\infty,1)\cup(2,\infty)", r"$(-\infty,1)\cup(2,\infty)$"),
    ("Paris", r"\boxed{\text{Paris}}"), ("Paris", "paris."), ("B", "(B)"), (r"\$18.90", r"\boxed{\$18.90}"),
    (r"\$32,\!348", "32,348"), ("$12.50", "It costs $12.50."), (r"-\$5", r"\boxed{-5}"), (r"$\$18.90$", "18.9"),
    ("7", r"\boxed{3}. \boxed{7}"), ("7", "<think>\\boxed{3}? No, 7.</think>\n\\boxed{7}"),
    ("5", "I see 3. <answer>5</answer>"), ("5", "Answer:5"), ("5", '"5"'), ("5", "`5`"), ("5", "# 5"), ("5", "(5)"),
    ("-5", "<answer>-5</answer>"), ("282", "- **282**"), ("7", "The answer: 7" + " " * 5000), ("13", r"\boxed{13.}"),
    ("-9/5", "We have x > 2.\n\n-9/5"), ("25", "100/4 = 25"), ("1024", r"\boxed{2^{10}=1024}"), ("1000000", "10^6"),
    (r"\frac{100}{4}", "100/4"), ("60", r"\boxed{60^{\circ}}"), ("6.6e-34", r"\boxed{6.6\times10^{-34}}"),
    (r"\frac{1}{2004!}", r"\boxed{\frac{1}{2004!}}"), ("10^{-400}", r"\boxed{10^{-400}}"),
    ("1e-9, 1", r"\boxed{1, 1e-9}"), (r"(1, \frac{10^{-9}}{3})", r"\boxed{(1, 3.33333e-10)}"),
    (r"\begin{pmatrix}1e-9\\1\end{pmatrix}", r"\boxed{\begin{pmatrix}1e-9\\1\end{pmatrix}}"),
    ("0.00033333", r"\boxed{\frac{1}{3000}}"), ("0", r"$\sin(\pi)$"), (r"\pi", "3.14159265"),
    ("1e400", r"\boxed{10^{400}}"),    (r"\frac{10^{10}}{3}", "3333333333.33"),
    (r"\sqrt{2}\cdot10^{20}", r"\boxed{1.41421356\times10^{20}}"),
    ("0.5%", r"\boxed{0.005}"), ("9" * 400, "9" * 400), ("1/3", "0.33333333333"), ("1/8", "0.125"),
    ("x=5.0", r"\boxed{5}"), ("2.5", r"\boxed{x=2.5}"), ("(1.0, 2)", "(1, 2)"),
    ("9%", r"\boxed{9}"),
]  # fmt: skip
WRONG = [
    ("46", "45"), ("46", "-46"), ("46", ""), ("46", "no idea"), ("46", "4 6"), ("46", "12+34"), ("46", "$12+34$"),
    ("46", r"\boxed{2\cdot 23}"), ("46", "50-4"), ("46", "**12+34**"), ("46", "x = 12+34"), ("46", r"\boxed{}"),
    ("46", "\x00\ud800"), ("46", "46 it is\n" + "filler 5 " * 2000), ("46", "4\x1f6"), ("46", "4\x1e"), ("1", "1e3"),
    ("8", "2**3"), ("3", "5 **2"), ("1024", "2^10"), ("25", "100/4"), ("25", r"\boxed{\frac{100}{4}}"),
    ("5/6", "1/2+1/3"), (r"\frac{5}{6}", "7/6 - 1/3"), ("5", "it is \u22125"), ("-282", "- **282**"),
    (r"\frac{1}{2}", r"\boxed{\frac{1}{3}}"), ("x^2+1", r"\boxed{x^2-1}"), ("(1,2)", r"\boxed{[1,2]}"),
    ("(1,2)", "(2,1)"), ("2", "1, 2"), ("3", "{1, 2, 3}"), ("345", "12,345"), ("1,2", r"\boxed{1.2}"),
    ("Paris", r"\boxed{Rome}"), ("A", r"\boxed{B}"), (r"\$18.90", r"\boxed{\$1890}"), (r"\$36", "$"),
    (r"\$32,\!348", "32.348"), ("3", r"\boxed{3}. \boxed{7}"), ("8", "<think>\\boxed{8}</think>The answer is 9."),
    ("5", r"<think>\boxed{5}"), ("1/5", "We have x > 2.\n\n-9/5"), ("12", "<answer>5+7</answer>"),
    ("6.6e-34", "9.1e-31"), (r"6.6\times10^{-34}", r"\boxed{9.1\times10^{-31}}"), ("0", r"\boxed{1e-9}"),
    ("x=1e-9", r"\boxed{x=2e-9}"), (r"\frac{1}{2004!}", r"\boxed{\frac{1}{2006!}}"),
    (r"10^{-400}", r"\boxed{10^{-500}}"), ("(1, 6.6e-34)", r"\boxed{(1, 9.1e-31)}"),
    ("(1, 1.00001e-9)", r"\boxed{(1, 1e-9)}"), (r"\pi", "3.14"), (r"\pi", "3.142"), ("1/3", "0.333"),
    ("1/8", "0.1250001"),    ("1000000", "1000000.1"),
    ("x=5.0", r"\boxed{y=5.0}"), ("5.0", r"\boxed{x<5.0}"), ("(1.0, 2)", "(1, 3)"), ("1000000", "1000000.0000001"),
    ("9" * 400, "9" * 399 + "8"), ("9" * 400, "1e400"),
    (r"\frac{1}{20!}", r"\boxed{\frac{1}{21!}}"), ("1e-7", "2e-7"), (r"e^{-30}", r"\boxed{\frac{100001}{10^5}e^{-30}}"),
    (r"\sqrt{2}", r"\boxed{\sqrt{2}+10^{-9}}"), (r"[2,\infty)", r"\boxed{[2,5.0)}"), ("0.00001%", r"\boxed{0.00002\%}"),
    ("0", r"\boxed{0.0000001}"), (r"10^{20}", r"\boxed{10^{20}+1}"),
 ("1e-9, 1", r"\boxed{1, 2e-9}"), (r"[0, 1e-9]", r"\boxed{[0, 2e-9]}"),
    (r"\begin{pmatrix}1e-9\\1\end{pmatrix}", r"\boxed{\begin{pmatrix}2e-9\\1\end{pmatrix}}"),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "response"), RIGHT + WRONG, ids=lambda text: repr(text[:24]))
def test_equal_answers_are_rewarded_and_others_are_not(answer: str, response: str) -> None:
    result, right = math_verify("", response, answer), (answer, response) in RIGHT
    assert (result.reward, result.success, "reason" in result.metadata) == (float(right), right, not right)


def _digits(value: Fraction) -> list[int]:
    """Return the number of decimals, or nothing if no decimal equals the number."""
    return [n for n in range(60) if (value * 10**n).denominator == 1][:1]


def _written(value: Fraction, draw: st.DataObject) -> str:
    """Spell a number as a fraction, or as a decimal if it has one."""
    if not (decimals := _digits(value)) or draw.draw(st.booleans()):
        return f"\\frac{{{value.numerator}}}{{{value.denominator}}}" if value.denominator > 1 else str(value.numerator)
    (digits,) = decimals
    text = str(abs(value.numerator * 10**digits // value.denominator)).zfill(digits + 1)
    return "-" * (value < 0) + (f"{text[:-digits]}.{text[-digits:]}" if digits else text)


@examples(100)
@given(
    st.integers(-(10**9), 10**9).filter(bool), st.sampled_from([1, 2, 3, 7, 40, 625, 9999]), st.integers(-25, 25),
    st.sampled_from([0, 1, 3, 6, 12]), st.data(),
)  # fmt: skip
def test_numbers_are_equal_if_their_fractions_are(n: int, d: int, power: int, digits: int, data: st.DataObject) -> None:
    """At every magnitude, and however the numbers are written. The reference is exact arithmetic."""
    value = Fraction(n, d) * Fraction(10) ** power
    other = value + abs(value) * Fraction(data.draw(st.sampled_from([-1, 0, 1])), 10**digits)
    answer, said = _written(value, data), _written(other, data)
    is_rounded = "." in answer + said and any(not _digits(number) for number in (value, other))
    expected = value == other or (is_rounded and abs(value - other) <= max(abs(value), abs(other)) / 10**5)
    assert math_verify("", f"\\boxed{{{said}}}", answer).success == expected, (answer, said)


@examples(60)
@given(st.integers(1, 999), st.sampled_from([3, 7, 41, 97]), st.integers(-25, 25), st.integers(3, 9))
def test_a_decimal_of_a_number_without_one_is_rounded(n: int, d: int, power: int, digits: int) -> None:
    assume(n % d)
    value = Fraction(n, d) * Fraction(10) ** power
    rounded = f"{Decimal(value.numerator) / Decimal(value.denominator):.{digits - 1}e}"
    is_near = abs(Fraction(rounded) - value) <= max(Fraction(rounded), value) / 10**5
    answer = f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
    for pair in ((rounded, answer), (f"\\boxed{{{answer}}}", rounded)):
        assert math_verify("", *pair).success == is_near, pair


def test_options_of_math_verify() -> None:
    assert math_verify("", "12+34", "46", allow_arithmetic=True).success
    assert not math_verify("", "46", "46", require_boxed=True).success
    assert math_verify("", r"\boxed{46}", "46", require_boxed=True).success
    assert math_verify("", r"$\boxed 46$", "46", require_boxed=True).success
    cut = math_verify("", "1 " * 40 + "46", "46", max_chars=20)
    assert cut.success
    assert cut.metadata == {"cut_chars": 62}
    # a cut never makes a number from half of one
    assert not math_verify("", "1234567 " + "x" * 10, "4567", max_chars=15).success


@pytest.mark.parametrize("answer", ["", "(" * 40 + "1" + ")" * 40, "1+" * 600 + "1"], ids=lambda a: repr(a[:9]))
def test_a_ground_truth_that_cannot_be_parsed_is_an_error(answer: str) -> None:
    with pytest.raises(ValueError, match="the ground truth '"):
        math_verify("", "46", answer)


@pytest.mark.parametrize(
    ("pattern", "response", "reward"),
    [
        (r"<think>.+</think>.*", "<think>a\nb</think>46", 1.0), (r"<think>.+</think>.*", "x<think>a</think>46", 0.0),
        (r"\d+", "\u0664\u0666", 1.0), (r"[0-9]+", "\u0664\u0666", 0.0), (r"\d+", "46\n", 0.0), (r"\d+", "", 0.0),
        (r"\d*", "", 1.0), (r"yes|no", "no", 1.0), (r"yes|no", "yes, no", 0.0), (r"^yes$", "yes\n", 0.0),
        (r"[^\n]{1,5}", "abcdef", 0.0), (r"(?s:.*)Answer: \S+", "a\nb\nAnswer: 46", 1.0), (r"(\w+) \1", "ha he", 0.0),
    ],
)  # fmt: skip
def test_format(pattern: str, response: str, reward: float) -> None:
    result = response_format("", response, "", pattern=pattern)
    assert (result.reward, result.success) == (reward, reward == 1.0)


# limit 10, buffer 4: 0 up to 10 characters, -1 from 14 on (DAPO, equation 13)
@pytest.mark.parametrize(("length", "reward"), [(0, 0.0), (10, 0.0), (11, -0.25), (13, -0.75), (14, -1.0), (99, -1.0)])
def test_length(length: int, reward: float) -> None:
    result = response_length("", "x" * length, "", limit=10, buffer=4)
    assert (result.reward, result.success) == (reward, length <= 10)
    assert response_length("", "x" * length, "", limit=10).reward == (0.0 if length <= 10 else -1.0)


def test_names_and_import_paths_lead_to_functions() -> None:
    assert resolve_reward("math_verify") is math_verify
    assert resolve_reward("slime_like.sandbox.rewards.answers:response_length") is response_length
    for name in REGISTERED:
        assert callable(resolve_reward(name))


def test_options_a_function_does_not_take_are_rejected() -> None:
    try_options("length", response_length, {"limit": 3})
    for options in ({}, {"limit": 3, "most": 4}, {"response": "x", "limit": 3}):
        with pytest.raises(ValueError, match="it takes prompt: str, response: str, answer"):
            try_options("length", response_length, options)


# ------------------------------------------------------------------------------------------------------------ majority
@pytest.mark.parametrize(
    ("responses", "rewards"),
    [
        (["It is 42", "so \\boxed{42.0}", "42/1", "41"], [1, 1, 1, 0]),
        (["1", "2"], [0, 0]),  # tied: the order of samples decides nothing
        (["1", "2", "2", "1", "3"], [0, 0, 0, 0, 0]),
        (["7", "no idea", "none"], [1, 0, 0]),
        (["\\boxed{x+1}", "\\boxed{x+1}", "5"], [1, 1, 0]),
        (["1,000", "1000", "1000.5"], [1, 1, 0]),
        ([r"\boxed{\frac{1}{2}}", r"\boxed{\frac{3}{2}}", r"\boxed{0.5}"], [1, 0, 1]),
        ([r"\boxed{x + \sqrt{2}}", r"\boxed{x+\sqrt{2}}", r"\boxed{\sqrt{2}}"], [1, 1, 0]),
        (["\\boxed{7}</think>8", "8", "7"], [1, 1, 0]),
        (["", "", ""], [0, 0, 0]),
        (["9" * 5000, "9" * 5000, "1/0"], [1, 1, 0]),
        (["1e-7", "5e-7", "0.0000005"], [0, 1, 1]),
        (["6.6e-34", "9.1e-31", r"\boxed{9.1e-31}", ".1e-400", "1e-401"], [0, 0, 0, 0, 0]),
        (["0.333", "1/3", r"\boxed{\frac{1}{3}}"], [0, 1, 1]),
    ],
)
def test_the_majority_is_the_answer_most_give(responses: list[str], rewards: list[int]) -> None:
    results = majority("", responses, "ignored")
    assert [result.reward for result in results] == rewards
    assert [result.success for result in results] == [bool(reward) for reward in rewards]


def test_a_majority_may_have_to_be_large() -> None:
    responses = ["1", "1", "2", "3"]
    assert [r.reward for r in majority("", responses, "", min_share=0.5)] == [1, 1, 0, 0]
    assert [r.reward for r in majority("", responses, "", min_share=0.6)] == [0, 0, 0, 0]
    assert [r.reward for r in majority("", ["Yes", " yes ", "no"], "", require_answer=False)] == [1, 1, 0]
