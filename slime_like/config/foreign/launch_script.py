"""The commands of a script that start a trainer, read in order and not run.

A variable has the value that it has where the command stands. What is assigned in a branch, a loop or a function is
known only when the script runs, and so are what a command prints and the arguments of a function.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from slime_like.config.foreign.shell_values import SPLIT, Variables, as_written, defaulted, is_known
from slime_like.config.foreign.shell_words import QUOTED, Array, Operator, tokens

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL)
_ELEMENTS = re.compile(rf"[${QUOTED}]\{{([A-Za-z_]\w*)\[[@*]\]\}}")
_SUBSCRIPT, _NO_NAME = re.compile(r"\[[^]]*\]="), re.compile(r"-|\+*[\w.]+=")
_ONE_ELEMENT = re.compile(r"\{([A-Za-z_]\w*)\[")
_BEGIN, _END = {"if", "while", "until", "for", "select", "case", "function", "{"}, {"fi", "done", "esac", "}"}
_REPEATED = {"while", "until", "for", "select", "function", "{"}
_ASSIGNING = {"for", "select", "read", "unset", "let", "mapfile", "readarray", "getopts"}
_NAME, _EVALUATED = re.compile(r"[A-Za-z_]\w*"), re.compile(r"([A-Za-z_]\w*)\+?=")
_COUNTED = re.compile(r"(?:\+\+|--)([A-Za-z_]\w*)|([A-Za-z_]\w*)(?:\+\+|--)")
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
        sourced: files whose commands the script takes as its own.
    """

    words: tuple[Argument, ...]
    absent: tuple[str, ...]
    idle: tuple[str, ...] = ()
    cut: tuple[str, ...] = ()
    sourced: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Statement:
    """Words, whether they run for sure, and whether what stands below may run before them."""

    words: tuple[str | Array, ...]
    is_certain: bool
    is_repeated: bool


def launches(script: str, starts: Callable[[Sequence[Argument]], bool]) -> list[Launch]:
    """The commands whose words ``starts`` a trainer, in order.

    Raises:
        UnclosedQuoteError: a script that no shell reads.
    """
    state, found, cut, sourced = _State(), list[Launch](), list[str](), list[str]()
    statements = list(_statements(script))
    for place, statement in enumerate(statements):
        state.variables.is_certain = statement.is_certain
        words = _assigned(list(statement.words), state)
        if not words:
            continue
        for name in _assigned_by_command([str(word) for word in words]):
            state.forget(name)
        if words[0] in ("source", "."):
            sourced.append(" ".join(as_written(str(word)) for word in words))
        launch = state.command(words)
        if statement.is_certain and launch.words and _NO_NAME.match(launch.words[0].text):
            cut.append(" ".join(each.text for each in launch.words))
        elif starts(launch.words):
            if statement.is_repeated:
                for name in _names_assigned(statements[place + 1 :]):
                    state.forget(name)
                launch = state.command(words)
            if starts(launch.words):
                found.append(launch)
    idle = tuple(f"${{{name}[@]}}" for name in state.arrays if name not in state.taken)
    return [replace(launch, idle=idle, cut=tuple(cut), sourced=tuple(sourced)) for launch in found]


def _assigned_by_command(words: Sequence[str]) -> Iterator[str]:
    """Variables that a builtin command, or arithmetic, sets."""
    first, text = words[0], " ".join(words[1:])
    if first in _ASSIGNING:
        yield from _NAME.findall(text)
    elif first == "eval":
        yield from _EVALUATED.findall(text)
    elif first == "printf" and words[1:2] == ["-v"]:
        yield from words[2:3]
    elif counted := _COUNTED.fullmatch(first):
        yield counted[1] or counted[2]


def _names_assigned(statements: Sequence[_Statement]) -> Iterator[str]:
    for statement in statements:
        for word in statement.words:
            if isinstance(word, Array):
                yield word.name
            elif match := _ASSIGNMENT.fullmatch(word):
                yield match[1]


@dataclass(slots=True)
class _State:
    """Variables and arrays where the script has come to, and which of these were taken."""

    variables: Variables = field(default_factory=Variables)
    arrays: dict[str, tuple[Argument, ...]] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)

    def command(self, words: Sequence[str | Array]) -> Launch:
        """A command as it stands there."""
        absent: list[str] = []
        found = [each for word in words if isinstance(word, str) for each in self.arguments(word, absent)]
        return Launch(tuple(found), tuple(absent))

    def arguments(self, word: str, absent: list[str]) -> Iterator[Argument]:
        """What a word of a command becomes: the elements of an array, or what its value is split into."""
        if (elements := _ELEMENTS.fullmatch(word)) is not None:
            self.taken.add(elements[1])
            if elements[1] in self.arrays:
                found = self.arrays[elements[1]]
                yield from found if word[0] == QUOTED else _split(found)
            else:
                absent.append(as_written(word))
            return
        self.taken |= set(_ONE_ELEMENT.findall(word))
        text = self.variables.expanded(word)
        defaults = defaulted(text)
        if as_written(text) or word[:1] != "$":
            parts = text.split(SPLIT)
            whole = [part for part in parts if part] if len(parts) > 1 else parts
            yield from (Argument(as_written(part), is_known(part), defaults) for part in whole)
        elif defaults:
            yield Argument(as_written(word), known=False)

    def forget(self, name: str) -> None:
        """Nothing is known of the variable, or array, any more."""
        self.variables.values[name] = None
        if name in self.arrays:
            self.arrays[name] = tuple(replace(each, known=False) for each in self.arrays[name])

    def set_array(self, array: Array) -> None:
        absent: list[str] = []
        added = [
            replace(each, known=False) if _SUBSCRIPT.match(word) else each
            for word in array.words
            for each in self.arguments(word, absent)
        ]
        added += [Argument(name, known=False) for name in absent]
        before = self.arrays.get(array.name, ())
        if self.variables.is_certain:
            self.arrays[array.name] = (*(before if array.appends else ()), *added)
        else:
            certain = before if array.appends else tuple(replace(each, known=False) for each in before)
            self.arrays[array.name] = (*certain, *(replace(each, known=False) for each in added))


def _split(elements: Iterable[Argument]) -> Iterator[Argument]:
    """Elements that stand outside of quotes: each becomes its words."""
    for element in elements:
        yield from (replace(element, text=word) for word in element.text.split()) if element.known else [element]


def _assigned(words: list[str | Array], state: _State) -> list[str | Array]:
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
            state.set_array(word)
        elif match := _ASSIGNMENT.fullmatch(word):
            state.variables.assign(match[1], match[3], appends=bool(match[2]))
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
            is_repeated = any(each in _REPEATED for each in inside)
            yield _Statement(tuple(words), not inside and before not in ("&&", "||"), is_repeated)
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
