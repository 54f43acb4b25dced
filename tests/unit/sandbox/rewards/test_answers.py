"""Included rewards, case by case, and parts of a response that count: text after its thinking, and fenced blocks."""

import json

import pytest

from slime_like.interfaces.user_code import RewardResult
from slime_like.sandbox.rewards.answers import (
    after_thinking,
    exact_match,
    gsm8k,
    json_schema,
    last_block,
    last_match,
    multiple_choice,
)
from slime_like.sandbox.rewards.registry import resolve_reward, try_options
from slime_like.sandbox.rewards.thinking import without_opening
from tests.support.rejections import Rejects

# ----------------------------------------------------------------------------------------------------- text and numbers
_FINAL = r"Answer: (.*)"


@pytest.mark.parametrize(
    ("response", "answer", "pattern", "ignore_case", "right"),
    [
        (" New  York\n City", "New York City", None, False, True), ("", "", None, False, True),
        ("STRASSE", "straße", None, True, True), ("日本", "日本", None, False, True),
        ("Answer: x\nAnswer:  Paris \nbye", "Paris", _FINAL, False, True),
        ("ANSWER: paris", "Paris", rf"(?i){_FINAL}", True, True), ("12, then 46.", "46", r"\d+", False, True),
        ("Answer: ", "", _FINAL, False, True), ("Rome?</think>\nParis", "Paris", None, False, True),
        ("paris", "Paris", None, False, False), ("Paris.", "Paris", None, False, False),
        ("", "Paris", None, False, False), ("NewYork", "New York", None, False, False),
        ("1", "1.0", None, False, False), ("Paris", "Paris", _FINAL, False, False),
        ("Answer: Paris\nAnswer: Rome", "Paris", _FINAL, False, False),
        ("<a>46", "46", "<a>(.*?)</a>", False, False), ("Paris</think>Rome", "Paris", None, False, False),
        ("\x00", "Paris", None, True, False), ("Pari\u0301s", "Paris", None, True, False),
    ],
)  # fmt: skip
def test_exact_match(response: str, answer: str, pattern: str | None, ignore_case: bool, right: bool) -> None:
    assert _is_right(exact_match("", response, answer, pattern=pattern, ignore_case=ignore_case)) == right


@pytest.mark.parametrize(
    ("name", "right", "wrong", "answers"),
    [
        ("exact_match", "Roma", "Milan", ["Rome", "Roma"]), ("multiple_choice", "B", "C", ["A", "B"]),
        ("gsm8k", "#### 3", "#### 4", ["2", "3"]), ("math_verify", r"\boxed{3}", r"\boxed{4}", ["2", "3"]),
        ("exact_match", '["a"', '["a"]', None),
    ],
)  # fmt: skip
def test_any_of_several_answers_is_right(name: str, right: str, wrong: str, answers: list[str] | None) -> None:
    answer = right if answers is None else json.dumps(answers)
    rewards = [resolve_reward(name)("", response, answer).reward for response in (right, wrong)]
    assert rewards == [1.0, 0.0]


_TRUTH = "Each has 552.\nSo 2 * 552 = <<2*552=1104>>1104.\n#### 1,104"


@pytest.mark.parametrize(
    ("response", "answer", "marked", "right"),
    [
        ("so 2 * 552\n#### 1,104", _TRUTH, True, True), ("####1104", _TRUTH, True, True),
        ("#### 3?</think>#### 1104", _TRUTH, True, True), ("#### $1,104.00", _TRUTH, True, True),
        ("#### 1104 apples", _TRUTH, True, True), (r"#### \boxed{1104}", _TRUTH, True, True),
        ("#### \u22127", "-7", True, True), ("#### 1104 - all of them", _TRUTH, True, True),
        ("#### 3\nno:\n#### **1104**", _TRUTH, True, True), ("#### +7", "7", True, True),
        ("#### 0.5", "0.50", True, True), ("####: 7.", "7", True, True), (r"#### (\$1104)", _TRUTH, True, True),
        ("5, then 1,104.", _TRUTH, False, True), ("#### 1104 of 2000", _TRUTH, False, True),
        ("#### 1104 or so", _TRUTH, True, True),
        ("#### 1104</think>Done.", _TRUTH, True, False), ("1104</think>3", _TRUTH, False, False),
        ("#### 1105", _TRUTH, True, False), ("1104", _TRUTH, True, False), ("#### ", _TRUTH, True, False),
        ("#### 1104\n#### 3", _TRUTH, True, False), ("", _TRUTH, True, False), ("#### 11,04", _TRUTH, True, False),
        ("#### 110 4", _TRUTH, True, False), ("#### -1104", _TRUTH, True, False), ("### 1104", _TRUTH, True, False),
        ("#### 1e3", "1000", True, True), ("about 2e-7", "-7", False, False), ("it is 2e-7", "2e-7", False, True),
        ("#### .5", "0.5", True, True), ("it is .5", "5", False, False), ("#### 1e-400", "1e-500", True, False),
        ("#### 6.6e-34", "9.1e-31", True, False), ("#### 0.333", "0.3333", True, False),
        ("9" * 200 + "7", "7", False, False), (f"#### {'9' * 401}", "9" * 401, True, True),
        (f"#### {'9' * 401}", "9" * 400 + "8", True, False), (f"#### {'9' * 401}.", "1e401", True, False),
        ("1104, no 1105", _TRUTH, False, False),
        ("#### x, but 1104", _TRUTH, False, False), ("#### 1104/2", _TRUTH, True, False),
        ("#### 1104-3", _TRUTH, True, False), ("#### 1104 or maybe 6", _TRUTH, True, False),
        ("#### 1104, -6", _TRUTH, True, False), ("#### 7,6", "7", True, False), ("#### 5**2", "5", True, False),
        (r"#### 5 \times 2", "5", True, False), ("#### 5.5.5", "5.5", True, False),
        ("#### \u0661\u0661x", _TRUTH, True, False),
    ],
)  # fmt: skip
def test_gsm8k(response: str, answer: str, marked: bool, right: bool) -> None:
    assert _is_right(gsm8k("", response, answer, require_marker=marked)) == right


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        ("B", "B", True), ("(B).", "(B)", True), ("B) Paris", "B", True), ("The answer is **B**", "b", True),
        ("Answer: B", "B.", True), ("**Final Answer:** B", "B", True), ('{"answer": "B"}', "B", True),
        ("So the correct answer is: (B).", "B", True), ("<answer>B</answer> as said", "B", True),
        (r"$\boxed{\text{B}}$", "B", True), (r"\boxed{\textbf{(B)}}", "B", True), (r"\boxed{B. 42}", "B", True),
        (r"Answer: A, so \boxed{B}", "B", True), ("The answer is A. No, the answer is B.", "B", True),
        ("A is wrong.\nAnswer: $B$\nHope this helps!", "B", True), ("<think>Answer: A</think>\n\nJ", "J", True),
        ("Answer: B", "C", False), ("b", "B", False), ("", "B", False), ("K", "B", False), ("AB", "B", False),
        ("I choose B.", "B", False), ("Answer: A or B", "A", False), ("The answer is A) or B)", "A", False),
        ("Answer: A, B", "B", False), ("The answer is not B", "B", False), ("The answer is A?", "A", False),
        ("Answer: A lot of things", "A", False), ("The wrong answer is B", "B", False), (r"\boxed{BC}", "B", False),
        (r"\boxed{A \text{ or } B}", "A", False), (r"\boxed{A. B. C}", "A", False), (r"\boxed{A dog}", "A", False),
        ("The answer is B. No, the answer is C", "B", False), ('<think>"The answer is A."</think>?', "A", False),
        ("Answer: A</think>", "A", False), ("answer" + "*" * 4000, "A", False), ("\\boxed{" + " " * 4000, "A", False),
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
        ("code", json.dumps(["assert f(2) == 4", "x = 1"])),
    ],
)  # fmt: skip
def test_an_unusable_ground_truth_is_an_error(name: str, answer: str) -> None:
    with pytest.raises(ValueError, match=r"the answer|JSON Schema|tests"):
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
        (' {"name": "a", "ages": [1.0]}\n', True), ('{"name":\n"\\u00e9"}', True), ('{"ages": [], "name": ""}', True),
        ('Here:\n```json\n[]\n```\nno:\n```JSON \n{"name": "a"}\n```\nDone.', True), ('```\n{"name": "a"}\n```', True),
        ('[]</think>{"name": "a"}', True), ('{"name": "a"}</think>[]', False),
        ('{"name": 1}', False), ("{}", False), ("[]", False), ("", False), ('{"name": "a", "more": 1}', False),
        ('{"name": "a", "ages": [-1]}', False), ('{"name": "a",}', False), ("{'name': 'a'}", False),
        ('{"name": "a"', False), ('Sure: {"name": "a"}', False), ('{"name": "a"} {"name": "b"}', False),
        ('{"name": "a", "ages": [NaN]}', False), ('```json\n{"name": "a"}\n```\n```json\n[]\n```', False),
        ("[" * 100_000, False), ('{"name": null}', False),
    ],
)  # fmt: skip
def test_json_schema(response: str, right: bool) -> None:
    assert _is_right(json_schema("", response, "", schema=_SCHEMA)) == right
    assert _is_right(json_schema("", response, json.dumps(_SCHEMA))) == right


def test_a_schema_downloads_nothing(rejects: Rejects) -> None:
    inside = {"$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n"}
    assert json_schema("", "3", json.dumps(inside)).success and not json_schema("", '"3"', json.dumps(inside)).success
    with pytest.raises(Exception, match="Unresolvable"):
        json_schema("", "3", '{"$ref": "http://127.0.0.1:9/schema"}')
    assert not json_schema("", "[" * 900 + "]" * 900, '{"items": {"$ref": "#"}}').metadata.get("detail")


def test_options_that_cannot_work_are_rejected() -> None:
    for name, options in (
        ("exact_match", {"pattern": "("}),
        ("json_schema", {"schema": {"type": "thing"}}),
        ("judge", {"url": "http://127.0.0.1/v1", "model": ""}),
        ("judge", {"url": "http://127.0.0.1/v1", "model": "m", "pattern": "x"}),
        ("judge", {"url": "ftp://127.0.0.1/v1", "model": "m"}),
        ("judge", {"url": "http://127.0.0.1/v1", "model": "m", "best": 0}),
        ("judge", {"url": "http://127.0.0.1/v1", "model": "m", "parameters": {"stream": True}}),
        ("judge", {"url": "http://127.0.0.1/v1", "model": "m", "parameters": 3}),
        ("judge", {"url": "http://127.0.0.1/v1", "model": "m", "headers_from": {"Authorization": "NOT_SET"}}),
        ("code", {"memory": 3}),
    ):
        faulty = {"exact_match": "unterminated", "json_schema": "JSON Schema"}.get(name, list(options)[-1])
        with pytest.raises(ValueError, match="url" if str(options.get("url")).startswith("ftp") else faulty):
            try_options(name, resolve_reward(name), options)
    try_options("json_schema", json_schema, {"schema": _SCHEMA})


def _is_right(result: RewardResult) -> bool:
    """Return the success, which must agree with the reward."""
    assert result.reward == float(result.success)
    return result.success


_PYTHON = ("python", "py")


@pytest.mark.parametrize(
    ("text", "block"),
    [
        ("```\na\n```", "a\n"), ("```python\na\n```", "a\n"), ("```Python\r\na\r\n```\r\n", "a\n"),
        ("``` python title=x\na\n```", "a\n"), ("so: ```py\na\n```", "a\n"), ("```py\na```", "a\n"),
        ("```py\n``` a\n", ""), ("```py\na\n\n b\n```", "a\n\n b\n"),
        ("```bash\npip\n```\nthen\n```python\na\n```\n", "a\n"),
        ("```bash\npip\n```python\na\n```\n", "a\n"),
        ("```python\na\n```\nIt prints:\n```\nb\n```\nor:\n```text\nc\n```", "a\n"),
        ("```python\na\n```\nbetter:\n```py\nb\n```", "b\n"), ("```\na\n```\nbetter:\n```\nb\n```", "b\n"),
        ("1. x\n   ```python\n   def f():\n       pass\n   ```", "def f():\n    pass\n"),
        ("````python\na\n```\nb\n```\n````", "a\n```\nb\n```\n"),
        ("```python\nprint('```')\n```", "print('```')\n"),
        ("", None), ("a `b` c", None), ("```python\na", None), ("```python a```", None), ("```json\na\n```", None),
        ("a\n```", None), ("`" * 10_000, None), ("```\n" * 10_000, ""),
    ],
)  # fmt: skip
def test_the_last_block_of_a_language(text: str, block: str | None) -> None:
    assert last_block(text, _PYTHON) == block


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("a", "a"), ("<think>a</think>b", "b"), ("a</think>b</think>c", "c"), ("a<think>b", "a"), ("<think>b", ""),
        ('<think>"Paris"</think>Paris', "Paris"), ("<think>`a</think>b", "b"),
        ("<think>```a```</think>```b```", "```b```"),
        ('<think>`so 5', ""), ('{"t": "</think>"}', '{"t": "</think>"}'), ("I wrote `<think>`.", "I wrote `<think>`."),
        ("S = '</think>'", "S = '</think>'"),
    ],
)  # fmt: skip
def test_the_answer_follows_the_thinking(response: str, answer: str) -> None:
    assert after_thinking(response) == answer


@pytest.mark.parametrize(
    ("response", "answer"), [("7", ""), ("hm\n</think>\n\n7", "\n\n7"), ("<think>hm</think>7", "7"), ("<think>7", "")]
)
def test_thinking_that_the_prompt_opens_is_thinking(response: str, answer: str) -> None:
    assert after_thinking(response, "3+4?<think>\n") == answer
    assert last_match("7", response, "3+4?<think>\n") == ("7" if answer else None)
    assert after_thinking("7", "<think></think>\n") == "7"
    assert after_thinking(without_opening("7", "<think>\n"), "<think>\n") == "7"  # a later turn
    assert without_opening("<think>hm", "<think>\n") == "<think>hm" and without_opening("7", "p") == "7"


@pytest.mark.parametrize(
    ("pattern", "response", "found"),
    [
        ("<a>(.*?)</a>", "<a>1</a>", "1"), ("<a>(.*?)</a>", "<a>1</a> no <a>2</a>", "2"), ("[0-9]", "1 2", "2"),
        ("<a>(.*?)</a>", "I write <a> so</think><a>1</a>", "1"), ("<a>(.*?)</a>", "<a>1</a></think>two", None),
        ("</think> *(.*)", "why</think> 1", "1"), ("</think> *(.*)", "why</think>", ""), ("x", "", None),
        ("(1)|2", "2", ""),
    ],
)  # fmt: skip
def test_the_last_match_after_the_thinking(pattern: str, response: str, found: str | None) -> None:
    assert last_match(pattern, response) == found
