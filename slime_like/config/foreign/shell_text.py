"""Expansion of a shell's variables and arithmetic in a word, without a shell."""

import ast
import operator
import re
from collections.abc import Mapping

OPENS, CLOSES = "\1", "\2"
"""Stand for the parentheses of ``$((...))`` while words are found: it is part of a word, spaces included."""

_NAME = re.compile(r"[A-Za-z_]\w*")
_DEFAULT = re.compile(r":?[-=]")
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_ARITHMETIC = re.compile(r"\$\(\(((?:[^()]|\([^()]*\))*)\)\)")
_LONGEST = 200
"""Characters of arithmetic that are evaluated."""


def with_arithmetic_marked(script: str) -> str:
    """Mark the parentheses of every ``$((...))`` and drop its spaces, so that it stays one word."""
    return _ARITHMETIC.sub(lambda found: f"${OPENS}{''.join(found[1].split())}{CLOSES}", script)


def unmarked(text: str) -> str:
    """The text as the script has it."""
    return text.replace(f"${OPENS}", "$((").replace(CLOSES, "))")


def expanded(text: str, variables: Mapping[str, str], inside: frozenset[str] = frozenset()) -> str:
    """The text with what is known of it replaced.

    A variable that the script assigns has that value, another the default that stands with it, as in ``${N:-8}``; what
    has neither stays. In its own assignment a variable is the user's, so that its default counts.

    Args:
        inside: variables whose values are being expanded.
    """
    parts, place = list[str](), 0
    while place < len(text):
        if text.startswith(f"${OPENS}", place):
            end = text.find(CLOSES, place)
            end = len(text) if end < 0 else end
            parts.append(_evaluated(text[place + 2 : end], variables, inside))
            place = end + 1
        elif text.startswith("${", place):
            end = _closing(text, place + 1)
            parts.append(_variable(text[place:end], variables, inside))
            place = end
        elif text[place] == "$" and (name := _NAME.match(text, place + 1)):
            parts.append(_value(name[0], text[place : name.end()], None, variables, inside))
            place = name.end()
        else:
            parts.append(text[place])
            place += 1
    return "".join(parts)


def _closing(text: str, start: int) -> int:
    """Behind the brace that closes the one at ``start``."""
    depth = 0
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return place + 1
    return len(text)


def _variable(whole: str, variables: Mapping[str, str], inside: frozenset[str]) -> str:
    content = whole[2:-1]
    name = _NAME.match(content)
    if name is None:
        return whole
    rest = content[name.end() :]
    sign = _DEFAULT.match(rest)
    if rest and sign is None:
        return whole
    default = None if sign is None else rest[sign.end() :]
    return _value(name[0], whole, default, variables, inside)


def _value(name: str, whole: str, default: str | None, variables: Mapping[str, str], inside: frozenset[str]) -> str:
    found = variables.get(name) if name not in inside else None
    found = default if found is None else found
    return whole if found is None else expanded(found, variables, inside | {name})


def _evaluated(expression: str, variables: Mapping[str, str], inside: frozenset[str]) -> str:
    """The number, or the arithmetic as it stands where it is more than whole numbers and their operators."""
    signed = expanded(expression, variables, inside)
    text = _NAME.sub(lambda name: expanded(f"${name[0]}", variables, inside), signed)
    try:
        if len(text) > _LONGEST:
            raise ValueError("too long")
        return str(_number(ast.parse(text.replace("/", "//"), mode="eval").body))
    except (ArithmeticError, SyntaxError, ValueError):
        return f"${OPENS}{expression}{CLOSES}"


def _number(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand)
    if isinstance(node, ast.BinOp) and (apply := _OPERATORS.get(type(node.op))):
        return int(apply(_number(node.left), _number(node.right)))
    raise ValueError("no arithmetic of whole numbers")
