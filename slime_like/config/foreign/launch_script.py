"""Arguments that a launch script passes, without running it: literal variables are replaced, commands are not run."""

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_ASSIGNMENT = re.compile(r"(?:export\s+)?([A-Za-z_]\w*)=(.*)", re.DOTALL)
_ARRAY = re.compile(r"^[ \t]*(?:export[ \t]+)?([A-Za-z_]\w*)=\((.*?)^[ \t]*\)", re.DOTALL | re.MULTILINE)
_VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)(?:(:?-)([^}]*))?\}|([A-Za-z_]\w*))")
_COMMAND = re.compile(r"\$\([^()]*\)|`[^`]*`")
_DYNAMIC = re.compile(r"\$[({\w@*#?!]")
_MOST_REPLACEMENTS = 10


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

    Where a command takes the elements of an array, the array stands by itself.
    """
    text = _COMMAND.sub("$(command)", "\n".join(_without_comment(line) for line in script.splitlines()))
    arrays = {match[1]: _words(match[2]) for match in _ARRAY.finditer(text)}
    lines = [_words(line) for line in _ARRAY.sub("", text).replace("\\\n", " ").splitlines()]
    variables = dict(_assignments(lines))
    expansions = {f"${{{name}[@]}}" for name in arrays}
    return [
        [_replaced(word, variables) for word in words if word not in expansions] for words in (*arrays.values(), *lines)
    ]


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
    def value(match: re.Match[str]) -> str:
        name, default = match[1] or match[4], match[3]
        found = variables.get(name, default)
        return match[0] if found is None else found

    for _ in range(_MOST_REPLACEMENTS):
        before, word = word, _VARIABLE.sub(value, word)
        if word == before:
            break
    return Argument(word, _DYNAMIC.search(word) is None)
