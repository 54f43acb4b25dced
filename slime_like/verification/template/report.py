"""The verdicts on a chat template as a table, and what carries loss in a conversation, in colour on a terminal."""

import sys
from collections.abc import Sequence
from typing import TextIO

from rich.table import Table
from rich.text import Text

from slime_like.data.messages import Messages
from slime_like.data.spans import ConversationEncoder, EncodedConversation, SpanFault
from slime_like.system.console import Console
from slime_like.system.words import counted
from slime_like.verification.template.histories import TOOL
from slime_like.verification.template.subject import Verdict

_WIDTH = 120
_STYLES = {"holds": "green", "FAILS": "bold red", "no": "yellow", "not tried": "dim"}
_LOSS, _NO_LOSS = "black on green", "dim"
_OPEN, _CLOSE = "\u27e6", "\u27e7"
"""Around what carries loss, where there is no colour."""

_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": {"a": 19, "b": 23}}}
_ASKED: Messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 19 + 23?"}]
_CALLED: Messages = [
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "content": "42", "tool_call_id": "abcdefghi", "name": "add"},
]
_ANSWERED: Messages = [
    {"role": "assistant", "content": "It is 42."},
    {"role": "user", "content": "Thanks!"},
    {"role": "assistant", "content": "You are welcome."},
]


def word_of(verdict: Verdict) -> str:
    """Return the verdict in a word; only "FAILS" makes the command fail."""
    if verdict.is_fatal:
        return "FAILS"
    return ("holds" if verdict.tried else "not tried") if verdict.holds else "no"


def print_verdicts(title: str, verdicts: Sequence[Verdict], stream: TextIO | None = None) -> None:
    """Print the table, then a line for every property that fails, with its smallest history."""
    stream = stream or sys.stdout
    table = Table(title=title, title_justify="left")
    for heading in ("property", "what holds", "needed for", "verdict"):
        table.add_column(heading, no_wrap=heading != "what holds")
    for verdict in verdicts:
        word = word_of(verdict)
        needed = ", ".join(verdict.tested.needed)
        table.add_row(verdict.tested.code, verdict.tested.statement, needed, Text(word, _STYLES[word]))
    _console(stream).print(table)
    for verdict in verdicts:
        if verdict.example is not None:
            example = _printable(verdict.example.text())
            stream.write(f"{verdict.tested.code}: {_printable(verdict.problem)}\n  smallest: {example}\n")
    stream.flush()


def sample(encoder: ConversationEncoder) -> EncodedConversation:
    """Encode the first built-in conversation that the template takes: with a tool, without, without a system message.

    Raises:
        SpanFault: it takes none.
    """
    try:
        return encoder.encode([*_ASKED, *_CALLED, *_ANSWERED], [TOOL])
    except SpanFault:
        try:
            return encoder.encode([*_ASKED, *_ANSWERED])
        except SpanFault:
            return encoder.encode([*_ASKED[1:], *_ANSWERED])


def print_conversation(name: str, encoded: EncodedConversation, stream: TextIO | None = None) -> None:
    """Print a conversation; what carries loss is coloured, or stands in brackets where there is no colour."""
    stream = stream or sys.stdout
    console = _console(stream)
    carrying = sum(end - start for start, end in encoded.spans)
    marks = ("", "") if console.color_system else (_OPEN, _CLOSE)
    how = "coloured" if console.color_system else f"in {_OPEN}{_CLOSE}"
    text, position = Text(), 0
    for start, end in encoded.characters:
        text.append(_printable(encoded.text[position:start]), _NO_LOSS)
        text.append(marks[0] + _printable(encoded.text[start:end]) + marks[1], _LOSS)
        position = end
    text.append(_printable(encoded.text[position:]), _NO_LOSS)
    stream.write(f"{name}: {carrying} of {counted(len(encoded.tokens), 'token')} carry loss ({how})\n")
    console.print(text, soft_wrap=True)


def _console(stream: TextIO) -> Console:
    return Console(file=stream, width=None if stream.isatty() else _WIDTH, highlight=False, emoji=False)


def _printable(text: str) -> str:
    """The text with escapes for what a terminal would obey; line breaks stay."""
    return "".join(each if each.isprintable() or each == "\n" else ascii(each)[1:-1] for each in text)
