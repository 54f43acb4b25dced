"""Turns as a chat template writes them: text that stays plain, and what follows an assistant's turn."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

CUT = "\ufdd0"
"""Mark at which text is cut before encoding. It is a Unicode noncharacter, so text never contains it."""

_SAID = "said-by-the-model"
_ASKED = {"role": "user", "content": "question"}
_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "environment", "arguments": {"said": _SAID}}}
_PLACEHOLDERS: tuple[Mapping[str, Any], ...] = ({"content": _SAID}, {"content": "", "tool_calls": [_CALL]})


def cut_special(text: str, special: re.Pattern[str]) -> str:
    """Insert a cut after the first character of every special token that ``text`` spells, so it encodes as text."""
    whole = text.encode("utf-8", "replace").decode().replace(CUT, "\ufffd")
    return special.sub(lambda found: found[0][:1] + CUT + found[0][1:], whole)


def text_after_turn(
    render: Callable[..., str], following: Sequence[Mapping[str, Any]], special: re.Pattern[str], called: bool = False
) -> tuple[str, str, str]:
    """Return what the template writes after an assistant's turn if ``following`` messages come next.

    Args:
        render: renders a list of messages; ``prompt`` says whether the generation prompt follows.
        called: whether the turn calls a tool. Some templates render answers of tools only after a call.

    Returns:
        The special token that ends the turn if it is the last, the one that ends it in history, and the text after that
        up to where the next turn begins. The tokens are empty if only the header of the next message ends a turn.
    """
    turn = {"role": "assistant", **_PLACEHOLDERS[called]}
    alone = render([_ASKED, turn], prompt=False).partition(_SAID)[2]
    after = render([_ASKED, turn, *following], prompt=True).partition(_SAID)[2]
    for end in reversed(list(special.finditer(alone))):
        if after.startswith(alone[: end.end()]):
            return end[0], end[0], after[end.end() :]
    first = special.search(alone)
    other = special.match(after, first.start()) if first and after.startswith(alone[: first.start()]) else None
    if first and other:
        return first[0], other[0], after[other.end() :]
    return "", "", after.removeprefix(alone.rstrip())
