"""Arguments that a launch script passes, without running it: literal variables are replaced, commands are not run."""

import re
import shlex
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from slime_like.config.foreign.shell_text import OPENS, expanded, unmarked, with_arithmetic_marked

_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_ARRAY = re.compile(
    r"""^[ \t]*(?:export[ \t]+|declare[ \t]+-a[ \t]+)?([A-Za-z_]\w*)\+?=\(((?:"[^"]*"|'[^']*'|[^()"'])*)\)""",
    re.MULTILINE,
)
_ELEMENTS = re.compile(r"\$\{([A-Za-z_]\w*)\[[@*]\]\}")
_COMMAND = re.compile(r"\$\([^()]*\)|`[^`]*`")
_OUTPUT = "$\0"  # of a command, while words are found: it has no parentheses
_DYNAMIC = re.compile(rf"\$[{{\w@*#?!\0{OPENS}]")


@dataclass(frozen=True, slots=True)
class Argument:
    """One word of a command line.

    Attributes:
        text: with literal variables replaced.
        known: false where a part of it is only known when the script runs.
    """

    text: str
    known: bool = True


def commands(script: str) -> list[list[Argument]]:
    """The words of each array and each command line of a script, in order; comments are left out.

    Where a command takes the elements of an array of the script, the array stands by itself; of one that is not there,
    so does its name, as a word that is not known.
    """
    text = with_arithmetic_marked("\n".join(_without_comment(line) for line in script.splitlines()))
    text = _COMMAND.sub(lambda _: _OUTPUT, text)
    arrays = [(match[1], _words(match[2])) for match in _ARRAY.finditer(text)]
    lines = [_words(line) for line in _ARRAY.sub("", text).replace("\\\n", " ").splitlines()]
    variables, found = dict(_assignments(lines)), {name for name, _ in arrays}
    parts = [part for words in (*(words for _, words in arrays), *lines) for part in _apart(words, found)]
    return [[_replaced(word, variables) for word in words] for words in parts]


def _apart(words: Sequence[str], arrays: Collection[str]) -> Iterator[list[str]]:
    """The words without the elements of arrays; an array that is not in the script is a part by itself."""
    rest = []
    for word in words:
        elements = _ELEMENTS.fullmatch(word)
        if elements is None:
            rest.append(word)
        elif elements[1] not in arrays:
            yield [word]
    yield rest


def _without_comment(line: str) -> str:
    """The line up to a ``#`` that begins a word outside of quotes."""
    quote = ""
    for place, character in enumerate(line):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character == "#" and (place == 0 or line[place - 1].isspace()):
            return line[:place]
    return line


def _assignments(lines: Sequence[Sequence[str]]) -> Iterator[tuple[str, str]]:
    for words in lines:
        if len(words) in (1, 2) and (match := _ASSIGNMENT.fullmatch(" ".join(words))):
            yield match[1], match[2]


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line.strip())
    except ValueError:  # a quote that is closed on another line
        return line.split()


def _replaced(word: str, variables: dict[str, str]) -> Argument:
    text = expanded(word, variables)
    return Argument(unmarked(text).replace(_OUTPUT, "$(command)"), _DYNAMIC.search(text) is None)


def absent_arrays(parts: Sequence[Sequence[Argument]]) -> list[str]:
    """Arrays that a command takes the elements of and that another file defines."""
    return [part[0].text for part in parts if len(part) == 1 and _ELEMENTS.fullmatch(part[0].text)]
