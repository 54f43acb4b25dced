"""The parts of a response that count: the text after its thinking, and fenced blocks."""

import re
import textwrap
from collections.abc import Container, Iterator

_THINKING, _THOUGHT = "<think>", "</think>"
_QUOTED_TAG = re.compile(r"""(?<!`)`</?think>`(?!`)|(["'])</?think>\1""")
_OPENING = re.compile(r"(`{3,})[ \t]*([^\s`]*)[^`]*$")


def with_opening(response: str, prompt: str) -> str:
    """Return the response after the ``<think>`` that the prompt ends with, if it does."""
    is_open = prompt.rstrip().endswith(_THINKING) and not response.lstrip().startswith(_THINKING)
    return f"{_THINKING}\n{response}" if is_open else response


def without_opening(response: str, prompt: str) -> str:
    """Return a later turn so that thinking that the first ``prompt`` opens does not continue in it."""
    return response if with_opening(response, prompt) == response else f"{_THINKING}{_THOUGHT}{response}"


def after_thinking(response: str, prompt: str = "") -> str:
    """Return the text after the last ``</think>``, without unfinished thinking. Quoted tags are text."""
    response = with_opening(response, prompt)
    begin, end = _answer_span(response)
    return response[begin:end]


def last_match(pattern: str, response: str, prompt: str = "") -> str | None:
    """Return the last match of a regular expression, or its first group if it has one; ``None`` without a match.

    A match inside the thinking does not count. A match that begins there counts if there is none after it.
    """
    response = with_opening(response, prompt)
    begin, end = _answer_span(response)
    matches = list(re.finditer(pattern, response[begin:end]))
    if begin and not matches:
        matches = [match for match in re.finditer(pattern, response) if match.end() >= begin]
    return (matches[-1].group(1 if matches[-1].re.groups else 0) or "") if matches else None


def _answer_span(response: str) -> tuple[int, int]:
    unquoted = _QUOTED_TAG.sub(lambda found: " " * len(found[0]), response)
    thought = unquoted.rfind(_THOUGHT)
    begin = 0 if thought < 0 else thought + len(_THOUGHT)
    thinking = unquoted.find(_THINKING, begin)
    return begin, len(response) if thinking < 0 else thinking


def last_block(text: str, languages: Container[str]) -> str | None:
    """Return the last fenced block of one of the languages (in lower case), else the last one without a language."""
    blocks = list(_blocks(text))
    of_language = [body for language, body in blocks if language in languages]
    unnamed = [body for language, body in blocks if not language]
    return next((found[-1] for found in (of_language, unnamed) if found), None)


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield language and text of each closed block.

    A block may open after other text. It closes where a line begins or ends with its fence. A fence that is followed by
    a language opens the next block.
    """
    fence, language, body = "", "", list[str]()
    for line in text.replace("\r\n", "\n").split("\n"):
        opening, bare = _OPENING.search(line), line.strip()
        begins = bool(fence) and bare.startswith(fence)
        if opening and (not fence or (begins and bare.lstrip("`")[:1].isalpha())):
            fence, language, body = opening[1], opening[2].lower(), []
        elif begins or (fence and bare.endswith(fence)):
            lines = body if begins else [*body, line.rstrip().removesuffix(fence)]
            yield language, textwrap.dedent("".join(f"{each}\n" for each in lines))  # in a list it is indented
            fence = ""
        else:
            body.append(line)
