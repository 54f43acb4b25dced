"""The parts of a response that count: the text after its thinking, and fenced blocks."""

import pytest

from slime_like.sandbox.rewards.response_parts import after_thinking, last_block, last_match, without_opening

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
