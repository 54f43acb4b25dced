"""Rewards by name, case by case: right forms, wrong ones, and those that look right."""

import json

import pytest

from slime_like.interfaces.reward import RewardResult
from slime_like.sandbox.rewards.final_answer import exact_match, gsm8k
from slime_like.sandbox.rewards.json_answer import json_schema
from slime_like.sandbox.rewards.letter_answer import multiple_choice
from slime_like.sandbox.rewards.registry import resolve_reward, try_options
from tests.support.rejections import Rejects

# ----------------------------------------------------------------------------------------------------- text and numbers
_FINAL = r"Answer: (.*)"


@pytest.mark.parametrize(
    ("response", "answer", "pattern", "ignore_case", "right"),
    [
        ("Paris", "Paris", None, False, True), (" Paris\n", "Paris", None, False, True),
        ("New  York\n City", "New York City", None, False, True), ("", "", None, False, True),
        ("paris", "Paris", None, True, True), ("STRASSE", "straße", None, True, True),
        ("1.0", "1.0", None, False, True), ("a\tb", "a b", None, False, True), ("日本", "日本", None, False, True),
        ("so Answer: Paris", "Paris", _FINAL, False, True), ("Answer: x\nAnswer: Paris", "Paris", _FINAL, False, True),
        ("Answer:  Paris \nbye", "Paris", _FINAL, False, True),
        ("ANSWER: paris", "Paris", rf"(?i){_FINAL}", True, True),
        ("<a>46</a>", "46", "<a>(.*?)</a>", False, True), ("first 12, then 46.", "46", r"\d+", False, True),
        ("Answer: ", "", _FINAL, False, True),
        ("Rome", "Paris", None, False, False), ("paris", "Paris", None, False, False),
        ("Paris.", "Paris", None, False, False),
        ("", "Paris", None, False, False), ("The answer is Paris", "Paris", None, False, False),
        ("NewYork", "New York", None, False, False), ("1", "1.0", None, False, False),
        ("Paris Rome", "Paris", None, True, False),
        ("Paris", "Paris", _FINAL, False, False), ("Answer: Paris\nAnswer: Rome", "Paris", _FINAL, False, False),
        ("Answer: Paris, France", "Paris", _FINAL, False, False), ("answer: Paris", "Paris", _FINAL, False, False),
        ("46 is what I say, 47", "46", r"\d+", False, False), ("<a>46", "46", "<a>(.*?)</a>", False, False),
        ("Rome?</think>\nParis", "Paris", None, False, True), ("Paris</think>Rome", "Paris", None, False, False),
        ("\x00", "Paris", None, True, False), ("Pari\u0301s", "Paris", None, True, False),
    ],
)  # fmt: skip
def test_exact_match(response: str, answer: str, pattern: str | None, ignore_case: bool, right: bool) -> None:
    assert _is_right(exact_match("", response, answer, pattern=pattern, ignore_case=ignore_case)) == right


_TRUTH = "Each has 552.\nSo 2 * 552 = <<2*552=1104>>1104.\n#### 1,104"


@pytest.mark.parametrize(
    ("response", "answer", "marked", "right"),
    [
        ("#### 1104", _TRUTH, True, True), ("so 2 * 552\n#### 1,104", _TRUTH, True, True),
        ("####1104", _TRUTH, True, True), ("#### 3?</think>#### 1104", _TRUTH, True, True),
        ("#### 1104</think>Done.", _TRUTH, True, False), ("1104</think>3", _TRUTH, False, False),
        ("#### 1104.0", _TRUTH, True, True), ("#### $1,104.00", _TRUTH, True, True),
        ("#### 1104 apples", _TRUTH, True, True), (r"#### \boxed{1104}", _TRUTH, True, True),
        ("#### \u22127", "-7", True, True), ("#### 1104 - all of them", _TRUTH, True, True),
        ("#### **1104**", _TRUTH, True, True), ("#### 3\nno:\n#### 1104", _TRUTH, True, True),
        ("#### 1104.", _TRUTH, True, True),
        ("#### -7", "#### -7", True, True), ("#### +7", "7", True, True), ("#### 0", "#### 0", True, True),
        ("#### 0.5", "0.50", True, True), ("####: 7", "7", True, True), ("it is 1104", _TRUTH, False, True),
        ("5, then 1,104.", _TRUTH, False, True), ("#### 1104 of 2000", _TRUTH, False, True),
        ("#### 1105", _TRUTH, True, False), ("1104", _TRUTH, True, False), ("#### ", _TRUTH, True, False),
        ("#### no idea 1104", _TRUTH, True, False), ("#### 1104\n#### 3", _TRUTH, True, False),
        ("", _TRUTH, True, False),
        ("#### 11,04", _TRUTH, True, False), ("#### 110 4", _TRUTH, True, False), ("#### -1104", _TRUTH, True, False),
        ("### 1104", _TRUTH, True, False), ("#### 1.104", _TRUTH, True, False), ("#### 1e3", "1000", True, False),
        ("1104, no 1105", _TRUTH, False, False), ("none", _TRUTH, False, False),
        ("#### x, but 1104", _TRUTH, False, False),
        ("#### 1104/2", _TRUTH, True, False), ("#### 1104 or 1105", _TRUTH, True, False),
        ("#### 1104:30", _TRUTH, True, False), ("#### 1104-3", _TRUTH, True, False),
        ("#### 1104e2", _TRUTH, True, False),
        (r"#### \$1104", _TRUTH, True, True), ("#### 1104 or so", _TRUTH, True, True),
        ("####\n1104", _TRUTH, True, True), ("#### `1104`", _TRUTH, True, True), ("#### (1104)", _TRUTH, True, True),
        ("#### 1104 or maybe 6", _TRUTH, True, False), ("#### 1104 or $6", _TRUTH, True, False),
        ("#### 1104 (or 6)", _TRUTH, True, False), ("#### 1104, -6", _TRUTH, True, False),
        ("#### 1104 and 6", _TRUTH, True, False), ("#### 1104, 6", _TRUTH, True, False),
        ("#### 7,6", "7", True, False), ("#### 1104 to 1110", _TRUTH, True, False),
        ("#### 1104;6", _TRUTH, True, False), ("#### 5**2", "5", True, False), (r"#### 5 \times 2", "5", True, False),
        ("#### 5x2", "5", True, False), ("#### 5.5.5", "5.5", True, False),
        ("#### 2*552", _TRUTH, True, False), ("#### \u0661\u0661x", _TRUTH, True, False),
    ],
)  # fmt: skip
def test_gsm8k(response: str, answer: str, marked: bool, right: bool) -> None:
    assert _is_right(gsm8k("", response, answer, require_marker=marked)) == right


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        ("B", "B", True), ("(B)", "B", True), ("B.", "B", True), ("**B**", "B", True), ("B) Paris", "B", True),
        ("(B). Paris it is", "(B)", True), ("The answer is B", "b", True), ("The answer is (B).", "B", True),
        ("Answer: B", "B.", True), ("**Answer:** B", "B", True), ("Answer: **B**", "B", True),
        ("So option B.", "B", True),
        (r"\boxed{B}", "B", True), (r"$\boxed{\text{B}}$", "B", True), (r"\boxed{(B)}", "B", True),
        ("A is wrong.\nThe answer is B", "B", True), ("The answer is A. No, the answer is B", "B", True),
        ("Choice (J)", "J", True), ("A: no\nB: yes\n\nB", "B", True), (r"answer is A, so \boxed{B}", "B", True),
        ("The answer is C because option B is too small.", "C", True), ("<think>option A</think>\n\nC", "C", True),
        ("Answer: C. Choice D needs more.", "D", False), ("The answer is B, not option C.", "C", False),
        ("answer" + "*" * 4000, "A", False), ("\\boxed{" + " " * 4000, "A", False),
        ("<answer>B</answer>", "B", True), (r"\boxed{\textbf{(B)}}", "B", True), (r"\boxed{BC}", "B", False),
        (r"\boxed{B. 42}", "B", True), (r"\boxed{(B) 42}", "B", True), ("The answer is I.", "I", True),
        ("The answer is I don't know", "I", False), (r"\boxed{A dog}", "A", False), (r"\boxed{Bananas}", "B", False),
        ("Answer: $B$", "B", True), (r"Answer: \(B\)", "B", True), (r"Answer: \textbf{B}", "B", True),
        ('Answer: "B"', "B", True), ("answer is `B`.", "B", True), ("Answer: [B]", "B", True),
        ('{"answer": "B"}', "B", True), ("The answer is: Rome (B)", "B", True), ("I choose B.", "B", True),
        ("B is correct, as Rome is the capital.", "B", True), ("So (B) is the answer", "B", True),
        ("B\n\nBecause it is Rome.", "B", True), ("(B) Rome is the capital.\nHope this helps!", "B", True),
        ("The answer should be **B**", "B", True), ("The answer is A because of C.", "A", True),
        ("A) x\nB) y\n\nB", "B", True), ("The answer is A, I think.", "A", True),
        ("The answer is B, not C.", "B", True),
        ("The answer to the question is most likely B.", "B", True), ("Therefore, B.", "B", True),
        ("It is B.", "B", True),
        ("I'd go with B.", "B", True), ("Answer = B", "B", True), ("B - Paris", "B", True), ("B, because x", "B", True),
        ("I first thought A, but the answer is B.", "B", True), ("The answer is A and B is wrong.", "A", True),
        ("The answer is A but B is close", "A", True), ("The answer is A by elimination", "A", True),
        ("Answer: A\nthe others are wrong.", "A", True), ("The answer is B and not A.", "B", True),
        ("Option A is too small. Option C is absurd.\n\n**B**", "B", True),
        ("Option A is too small. Option C is absurd.\n\nSo it must be B.", "B", True),
        ("A) x\nB) y\nC) z\n\nB) y", "B", True), ("Among A, B and C, the answer is B.", "B", True),
        ("The correct answer is D) A and B.", "D", True), ("The answer is D (A and B).", "D", True),
        ("**D) Both A and C**", "D", True), ("B. Vitamin C", "B", True), (r"\boxed{\text{B. Vitamin C}}", "B", True),
        ("Answer: C) I and II only", "C", True), ("(B) Hepatitis A and C", "B", True),
        ("So x = 5.\nThis corresponds to option C.", "C", True), ("I checked; it is, which is option (C).", "C", True),
        ("The answer is B.\n\nWhy not C? Because answer C would require heat.", "B", True),
        ("The answer is A. However, that is wrong. The answer is actually B.", "B", True),
        ("The correct answer to question A is 5.", "A", False), ("You might be tempted to choose B.", "B", False),
        ("The most appropriate choice is **B**.", "B", True), ("The one that is not prime is B.", "B", True),
        ("Consider option A.", "A", False), ('<think>"The answer is A."</think>I do not know.', "A", False),
        ("The answer is (A) or (B)", "A", False), ("The answer is **A** or **B**.", "B", False),
        ("Answer: (A), (B)", "A", False), ("The answer is (A)?", "A", False), ("Answer: A+C", "A", False),
        ("Answer: A B C D", "A", False), ("The answer is A (or B)", "A", False), ("Answer: A, maybe B", "A", False),
        (r"\boxed{(A) or (B)}", "A", False), (r"\boxed{A \text{ or } B}", "A", False), (r"\boxed{A. B. C}", "A", False),
        (r"\boxed{A\text{ is wrong}}", "A", False), (r"\boxed{A}, \boxed{B}", "B", False),
        ("Option A is incorrect.", "A", False), ("We can eliminate option A", "A", False),
        ("I don't pick A", "A", False), ("I doubt that A is correct", "A", False), ("A is best avoided", "A", False),
        ("Every option but A is correct", "A", False), ("Options A and B are correct", "B", False),
        ("A) x\nB) y", "B", False), ("The wrong answer is B", "B", False), ("Not the answer: B", "B", False),
        ("The answer is B? No, it is C.", "B", False), ("Answer: A lot of things", "A", False),
        ("The answer is A or B", "A", False), ("The answer is A or B", "B", False), ("Answer: A/B", "A", False),
        ("Answer: A, B", "A", False), ("Answer: A and B", "A", False), ("The answer is A good one", "A", False),
        ("The answer is not B", "B", False), ("B is not correct", "B", False), ("A, B is correct", "B", False),
        ("A", "B", False), ("", "B", False), ("b", "B", False), ("AB", "B", False), ("Paris", "B", False),
        ("A blue sky", "A", False), ("I am sure", "I", False), ("The answer is a number", "A", False),
        ("The answer is Blue", "B", False), ("B or C", "B", False),
        ("The answer is B. No, the answer is C", "B", False),
        (r"\boxed{B} or \boxed{C}", "B", False), ("K", "B", False), ("answer is B's friend", "B", False),
    ],
)  # fmt: skip
def test_multiple_choice(response: str, answer: str, right: bool) -> None:
    assert _is_right(multiple_choice("", response, answer)) == right


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("gsm8k", "no number"), ("gsm8k", "5 #### five"), ("multiple_choice", "2"), ("multiple_choice", "Paris"),
        ("json_schema", "3"), ("json_schema", "{"), ("json_schema", '{"type": "thing"}'), ("code", "def f("),
        ("code", "[]"), ("code", '{"inputs": ["1"], "outputs": []}'), ("code", "[1]"), ("code", " "),
        ("code", '{"inputs": ["1"], "outputs": ["1"], "fn_name": "f"}'),
        ("code", "M = {'a': 1}\n\ndef check(candidate):\n    assert candidate(2) == 4"),
        ("code", "class T:\n    def test(self):\n        assert f(2) == 4"), ("code", "# nothing"),
        ("code", "import sys\nsys.setrecursionlimit(9)\n\ndef check(c):\n    assert c(2) == 4"),
        ("code", json.dumps(["assert f(2) == 4", "x = 1"])),
    ],
)  # fmt: skip
def test_a_ground_truth_that_cannot_be_one_is_an_error(rejects: Rejects, name: str, answer: str) -> None:
    with rejects(ValueError):
        resolve_reward(name)("", "```python\n1\n```", answer)


# ---------------------------------------------------------------------------------------------------------------- JSON
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "ages": {"type": "array", "items": {"type": "integer", "minimum": 0}}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ('{"name": "a"}', True), (' {"name": "a", "ages": []}\n', True), ('{"name": "", "ages": [1, 2]}', True),
        ('Here:\n```json\n{"name": "a"}\n```\nDone.', True), ('```\n{"name": "a"}\n```', True), ('{"name": "é"}', True),
        ('```json\n[]\n```\nno:\n```json\n{"name": "a"}\n```', True), ('{"name": "a", "ages": [0]}', True),
        ('{"name":\n"a"}', True), ('{"ages": [1], "name": "a"}', True), ('{"name": "a", "ages": [1.0]}', True),
        ('{"name": "\\u00e9"}', True), ('```json \n{"name": "a"}\n```', True),
        ('[]</think>{"name": "a"}', True), ('{"name": "a"}</think>[]', False),
        ('```sh\nls\n```\nso:\n```JSON\n{"name": "a"}\n```\n```\n[]\n```', True),
        ('{"name": 1}', False), ("{}", False), ("[]", False), ('"a"', False), ("", False), ("null", False),
        ('{"name": "a", "more": 1}', False), ('{"name": "a", "ages": [-1]}', False),
        ('{"name": "a", "ages": [1.5]}', False),
        ('{"name": "a", "ages": ["1"]}', False), ('{"name": "a",}', False), ("{'name': 'a'}", False),
        ('{"name": "a"', False),
        ('Sure: {"name": "a"}', False), ('{"name": "a"} {"name": "b"}', False), ('{"name": "a", "ages": [NaN]}', False),
        ('```json\n{"name": "a"}\n```\nno:\n```json\n[]\n```', False), ("[" * 100_000, False),
        ('{"name": null}', False),
        ('{"name": true}', False),
    ],
)  # fmt: skip
def test_json_schema(response: str, right: bool) -> None:
    assert _is_right(json_schema("", response, "", schema=_SCHEMA)) == right
    assert _is_right(json_schema("", response, json.dumps(_SCHEMA))) == right


def test_a_schema_fetches_nothing(rejects: Rejects) -> None:
    inside = {"$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n"}
    assert json_schema("", "3", json.dumps(inside)).success and not json_schema("", '"3"', json.dumps(inside)).success
    with pytest.raises(Exception, match="Unresolvable"):
        json_schema("", "3", '{"$ref": "http://127.0.0.1:9/schema"}')
    assert not json_schema("", "[" * 900 + "]" * 900, '{"items": {"$ref": "#"}}').metadata.get("detail")


def test_options_that_cannot_work_are_rejected(rejects: Rejects) -> None:
    for name, options in (
        ("exact_match", {"pattern": "("}),
        ("json_schema", {"schema": {"type": "thing"}}),
        ("judge", {"url": "http://127.0.0.1/v1", "model": ""}),
        ("judge", {"url": "http://127.0.0.1/v1", "model": "m", "pattern": "x"}),
        ("judge", {"url": "ftp://127.0.0.1/v1", "model": "m"}),
        ("judge", {"url": "http://127.0.0.1/v1", "model": "m", "best": 0}),
        ("judge", {"url": "http://127.0.0.1/v1", "model": "m", "headers_from": {"Authorization": "NOT_SET"}}),
        ("code", {"memory": 3}),
    ):
        with rejects(ValueError):
            try_options(name, resolve_reward(name), options)
    try_options("json_schema", json_schema, {"schema": _SCHEMA})


def _is_right(result: RewardResult) -> bool:
    """Reward, success and reason agree."""
    assert result.reward == float(result.success)
    return result.success
