"""Values of a shell script's variables and arithmetic, without a shell."""

import ast
import operator
import re
from dataclasses import dataclass, field

from slime_like.config.foreign.shell_words import CLOSES, LITERAL, OPENS, OUTPUT, QUOTED

SPLIT, PERHAPS, _DEFAULTED = "\5", "\6", "\7"
"""Marks in values: where one of several words is split, as it stands outside of quotes; before a word that only a
branch adds; and around the name of a variable whose default follows, as the script does not set it."""

_NAME = re.compile(r"[A-Za-z_]\w*")
_BARE_NAME = re.compile(r"(?<![\w$\4])[A-Za-z_]\w*")
_DEFAULT = re.compile(r"(:?)([-=])")
_WHOLE_NUMBERS = re.compile(r"[\d()*/%+-]+")
_WORD = re.compile(r"\S+")
_BLANKS = re.compile(rf"([${QUOTED}]\{{[^{{}}]*\}})|\s+")
"""Where a value is split: not inside of what is left to replace."""
_DEFAULT_OF = re.compile(rf"{_DEFAULTED}(\w+){_DEFAULTED}")
_UNKNOWN = re.compile(rf"[${QUOTED}][{{\w@*#?!{OUTPUT}{OPENS}]")
_LONGEST, _LONGEST_ARITHMETIC = 10_000, 200
"""Characters of a value, and of arithmetic, that are taken; longer ones are known only when the script runs."""


def _quotient(a: int, b: int) -> int:
    """Towards zero, as a shell divides."""
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _quotient,
    ast.Mod: lambda a, b: a - b * _quotient(a, b),
}


def is_known(text: str) -> bool:
    """Whether nothing is left in it that a shell would replace."""
    return PERHAPS not in text and _UNKNOWN.search(text) is None


def defaulted(text: str) -> tuple[str, ...]:
    """Variables whose defaults are in it, as the script does not set them."""
    return tuple(dict.fromkeys(_DEFAULT_OF.findall(text)))


def as_written(text: str) -> str:
    """The text as somebody would write it, without marks."""
    plain = (
        _DEFAULT_OF.sub("", text)
        .replace(PERHAPS, "")
        .replace(OPENS, "((")
        .replace(CLOSES, "))")
        .replace(OUTPUT, "(command)")
        .replace(SPLIT, " ")
    )
    return plain.replace(LITERAL, "$").replace(QUOTED, "$")


@dataclass(slots=True)
class Variables:
    """Values at one place of a script; ``None``: known only when it runs."""

    values: dict[str, str | None] = field(default_factory=dict)
    is_certain: bool = True
    """Whether the command that stands there runs."""

    def assign(self, name: str, text: str, *, appends: bool) -> None:
        """``NAME=text``, or ``NAME+=text``; what may not be assigned leaves the words that stay whatever happens."""
        added = self.expanded(text).replace(SPLIT, " ")
        before = self.values.get(name, "" if appends else None)
        value = added if not appends else None if before is None else before + added
        self.values[name] = value if self.is_certain else _perhaps(before, value)

    def expanded(self, text: str, depth: int = 0) -> str:
        """The text with what is known of it replaced, and the rest as it stands."""
        parts, place = list[str](), 0
        while place < len(text):
            if text[place] not in ("$", QUOTED):
                parts.append(text[place])
                place += 1
                continue
            end, value = self._reference(text, place, depth)
            kept = text[place:end] if value is None else value
            is_whole = text[place] == QUOTED or value is None
            parts.append(kept if is_whole else _BLANKS.sub(lambda found: found[1] or SPLIT, kept))
            place = end
        whole = "".join(parts)
        return whole if len(whole) <= _LONGEST else f"${OUTPUT}"

    def _reference(self, text: str, start: int, depth: int) -> tuple[int, str | None]:
        """Where what begins with a ``$`` ends, and its value."""
        if text.startswith(OPENS, start + 1):
            end = text.find(CLOSES, start) + 1 or len(text)
            return end, self._arithmetic(text[start + 2 : end - 1])
        if text.startswith("{", start + 1):
            end = _closing(text, start + 1)
            return end, self._braces(text[start + 2 : end - 1], depth)
        if name := _NAME.match(text, start + 1):
            return name.end(), self.values.get(name[0])
        is_reference = _UNKNOWN.match(text, start) is not None
        return start + 1 + is_reference, None if is_reference else LITERAL

    def _braces(self, content: str, depth: int) -> str | None:
        name = _NAME.match(content)
        if name is None or depth > 20:
            return None
        rest = content[name.end() :]
        sign = _DEFAULT.match(rest)
        if rest and sign is None:
            return None
        is_set, value = name[0] in self.values, self.values.get(name[0])
        if sign is None or (is_set and value is None):
            return value
        if value is not None and PERHAPS in value:  # what is left of it may be nothing
            return None
        if value is not None and (_DEFAULT_OF.sub("", value) or not sign[1]):
            return value
        default = self.expanded(rest[sign.end() :], depth + 1).replace(SPLIT, " ")
        if not is_set:
            default = f"{_DEFAULTED}{name[0]}{_DEFAULTED}{default}"
        elif value:  # the marks of what may not be empty
            default = value + default
        if sign[2] == "=":
            self.values[name[0]] = default if self.is_certain else None
        return default

    def _arithmetic(self, expression: str) -> str | None:
        """The number; ``None`` of more than whole numbers and their operators."""
        own = self.expanded(expression)
        marked = _BARE_NAME.sub(lambda name: self.values.get(name[0]) or name[0], _DEFAULT_OF.sub("", own))
        marks = [mark[0] for mark in _DEFAULT_OF.finditer(own + marked)]
        text = _DEFAULT_OF.sub("", marked)
        try:
            if len(text) > _LONGEST_ARITHMETIC or not _WHOLE_NUMBERS.fullmatch(text):
                return None
            return "".join([*marks, str(_number(ast.parse(text, mode="eval").body))])
        except (ArithmeticError, SyntaxError, ValueError):
            return None


def _perhaps(before: str | None, value: str | None) -> str | None:
    """The value of which what follows ``before`` may be absent; ``None`` where more than that may change."""
    if before is None or value is None or not value.startswith(before):
        return None
    added = value[len(before) :]
    if before and not before[-1].isspace() and added and not added[0].isspace():
        return None
    return before + _WORD.sub(rf"{PERHAPS}\g<0>", added)


def _closing(text: str, start: int) -> int:
    """Behind the brace that closes the one at ``start``."""
    depth = 0
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return place + 1
    return len(text)


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand)
    if isinstance(node, ast.BinOp) and (apply := _OPERATORS.get(type(node.op))):
        return int(apply(_number(node.left), _number(node.right)))
    raise ValueError("no arithmetic of whole numbers")
