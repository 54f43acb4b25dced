"""The commands of a script that start a trainer, read in order and not run.

A variable has the value that it has where the command stands. What is assigned in a branch, a loop or a function is
known only when the script runs, and so are what a command prints and the arguments of a function.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from slime_like.config.foreign.shell_values import SPLIT, Variables, as_written, defaulted, is_known
from slime_like.config.foreign.shell_words import QUOTED, Array, Operator, tokens

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_ELEMENTS = re.compile(rf"[${QUOTED}]\{{([A-Za-z_]\w*)\[[@*]\]\}}")
_SUBSCRIPT, _NO_NAME = re.compile(r"\[[^]]*\]="), re.compile(r"-|\+*[\w.]+=")
_BEGIN, _END = {"if", "while", "until", "for", "select", "case", "function", "{"}, {"fi", "done", "esac", "}"}
_BEFORE_COMMANDS = {"if", "while", "until", "then", "else", "elif", "do", "!", "time", "{"}
_DECLARE = {"export", "declare", "local", "readonly", "typeset"}


@dataclass(frozen=True, slots=True)
class Argument:
    """One word of a command.

    Attributes:
        text: with known variables replaced.
        known: false where a part of it, or whether it is passed, is only known when the script runs.
        defaults: variables that the script does not set and whose defaults are in it.
    """

    text: str
    known: bool = True
    defaults: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Launch:
    """A command that starts a trainer.

    Attributes:
        words: with the elements of the script's arrays in their places.
        absent: arrays that it takes and that another file defines, as they are written.
        idle: arrays of the script that no command and no other array takes.
        cut: what stands where a command's name is expected, as behind a comment between continued lines.
    """

    words: tuple[Argument, ...]
    absent: tuple[str, ...]
    idle: tuple[str, ...] = ()
    cut: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Statement:
    words: tuple[str | Array, ...]
    is_certain: bool


def launches(script: str, starts: Callable[[Sequence[Argument]], bool]) -> list[Launch]:
    """The commands whose words ``starts`` a trainer, in order.

    Raises:
        UnclosedQuoteError: a script that no shell reads.
    """
    state, found, cut = _State(), list[Launch](), list[str]()
    for statement in _statements(script):
        words = _assigned(list(statement.words), statement.is_certain, state)
        if not words:
            continue
        if words[0] in ("for", "select", "read", "unset"):
            for name in filter(str.isidentifier, (word for word in words[1:] if isinstance(word, str))):
                state.variables.values[name] = None
        absent: list[str] = []
        command = [each for word in words if isinstance(word, str) for each in state.arguments(word, absent)]
        if statement.is_certain and command and _NO_NAME.match(command[0].text):
            cut.append(" ".join(each.text for each in command))
        elif starts(command):
            found.append(Launch(tuple(command), tuple(absent)))
    idle = tuple(f"${{{name}[@]}}" for name in state.arrays if name not in state.taken)
    return [replace(launch, idle=idle, cut=tuple(cut)) for launch in found]


@dataclass(slots=True)
class _State:
    """Variables and arrays where the script has come to, and which of these were taken."""

    variables: Variables = field(default_factory=Variables)
    arrays: dict[str, tuple[Argument, ...]] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)

    def arguments(self, word: str, absent: list[str]) -> Iterator[Argument]:
        """What a word of a command becomes: the elements of an array, or what its value is split into."""
        if (elements := _ELEMENTS.fullmatch(word)) is not None:
            self.taken.add(elements[1])
            if elements[1] in self.arrays:
                yield from self.arrays[elements[1]]
            else:
                absent.append(as_written(word))
            return
        text = self.variables.expanded(word)
        defaults = defaulted(text)
        if as_written(text) or word[:1] != "$":
            yield from (Argument(as_written(part), is_known(part), defaults) for part in text.split(SPLIT))
        elif defaults:
            yield Argument(as_written(word), known=False)

    def set_array(self, array: Array, is_certain: bool) -> None:
        absent: list[str] = []
        added = [
            replace(each, known=False) if _SUBSCRIPT.match(word) else each
            for word in array.words
            for each in self.arguments(word, absent)
        ]
        added += [Argument(name, known=False) for name in absent]
        before = self.arrays.get(array.name, ())
        if is_certain:
            self.arrays[array.name] = (*(before if array.appends else ()), *added)
        else:
            certain = before if array.appends else tuple(replace(each, known=False) for each in before)
            self.arrays[array.name] = (*certain, *(replace(each, known=False) for each in added))


def _assigned(words: list[str | Array], is_certain: bool, state: _State) -> list[str | Array]:
    """Carry out a statement of assignments and return no words; of a command, return its words without the assignments
    that precede it, which hold for that command alone."""
    if words and words[0] in _DECLARE:
        words = [word for word in words[1:] if not (isinstance(word, str) and word.startswith("-"))]
    own = 0
    while own < len(words) and (isinstance(words[own], Array) or _ASSIGNMENT.fullmatch(str(words[own]))):
        own += 1
    if own < len(words):
        return words[own:]
    for word in words:
        if isinstance(word, Array):
            state.set_array(word, is_certain)
        elif match := _ASSIGNMENT.fullmatch(word):
            state.variables.assign(match[1], match[3], appends=bool(match[2]), is_certain=is_certain)
    return []


def _statements(script: str) -> Iterator[_Statement]:
    """Commands and assignments; one that may not run, or not only once, is not certain."""
    inside: list[str] = []
    words: list[str | Array] = []
    before = "\n"
    for token in [*tokens(script), Operator("\n")]:
        if not isinstance(token, Operator):
            words.append(token)
            continue
        if words:
            words = _without_keywords(words, inside)
            yield _Statement(tuple(words), not inside and before not in ("&&", "||"))
        if token.text == "(":
            inside.append("(")
        elif token.text == ")" and inside[-1:] == ["("]:
            inside.pop()
        if words or token.text != "\n":
            before = token.text
        words = []


def _without_keywords(words: list[str | Array], inside: list[str]) -> list[str | Array]:
    """The command behind words such as ``then``; what begins or ends a branch is noted in ``inside``."""
    while words and isinstance(words[0], str):
        if words[0] in _END and inside:
            inside.pop()
        elif words[0] in _BEGIN:
            inside.append(words[0])
        if words[0] not in _BEFORE_COMMANDS | _END:
            break
        words = words[1:]
    return words
