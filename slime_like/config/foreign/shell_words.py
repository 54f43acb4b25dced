r"""Words of a shell script, without a shell: what is quoted is marked, and nothing is replaced or run.

Marks in words, as characters that no script has: ``LITERAL`` is a ``$`` that stays one, ``QUOTED`` one inside double
quotes, whose value is not split. What a command prints is ``$`` and ``OUTPUT``; ``OPENS`` and ``CLOSES`` are the
parentheses of ``$((...))``, whose spaces are dropped.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

OUTPUT, OPENS, CLOSES, LITERAL, QUOTED = "\0", "\1", "\2", "\3", "\4"

_MARKS = re.compile("[\0-\7]")
_ENDS = " \t\r\n;&|<>()"
_REDIRECTION, _OPERATOR = re.compile(r"&?[<>][<>&|]*"), re.compile(r"[;&|]+|[()]")
_ANSI_QUOTED = re.compile(r"\$'((?:[^'\\]|\\.)*)'", re.DOTALL)
_BRACES = re.compile(r"\{[^{}\s'\"$`\\]*(?:,|\.\.)[^{}\s'\"$`\\]*\}")
_ARRAY = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_DEEPEST = 20
"""Nested ``${...}`` that are read; one below is known only when the script runs."""


class UnclosedQuoteError(Exception):
    """A quote that begins in the line given is not closed."""


@dataclass(frozen=True, slots=True)
class Operator:
    """What ends a command, or begins or ends a subshell; a line's end is one."""

    text: str


@dataclass(frozen=True, slots=True)
class Array:
    """``NAME=(...)``, or ``NAME+=(...)``."""

    name: str
    appends: bool
    words: tuple[str, ...]


Token = str | Array | Operator


def tokens(script: str) -> Iterator[Token]:
    """Words, arrays and operators of a script in order; comments, redirections and here-documents are left out.

    Raises:
        UnclosedQuoteError: a script that no shell reads.
    """
    yield from _Reader(_MARKS.sub("?", script.replace("\r\n", "\n"))).tokens()


class _Reader:
    def __init__(self, text: str, depth: int = 0) -> None:
        self._text = text
        self._place = 0
        self._depth = depth
        self._here: list[str] = []

    def tokens(self) -> Iterator[Token]:
        while self._place < len(self._text):
            self._skip_blanks()
            if self._place == len(self._text):
                return
            if self._text[self._place] == "\n":
                self._place += 1
                self._skip_here_documents()
                yield Operator("\n")
            elif found := _REDIRECTION.match(self._text, self._place):
                self._redirection(found[0])
            elif found := _OPERATOR.match(self._text, self._place):
                self._place = found.end()
                yield Operator(found[0])
            else:
                yield from self._word_or_array()

    def _skip_blanks(self) -> None:
        """Up to what is no space, comment or continued line."""
        while self._place < len(self._text):
            if self._text[self._place] in " \t\r":
                self._place += 1
            elif self._text.startswith("\\\n", self._place):
                self._place += 2
            elif self._text[self._place] == "#":
                self._place = self._found("\n")
            else:
                return

    def _redirection(self, sign: str) -> None:
        """Skip it with the file, or the delimiter, that follows."""
        self._place += len(sign)
        self._skip_blanks()
        target = self._word()
        if sign == "<<" and target:
            self._here.append(target.lstrip("-"))

    def _skip_here_documents(self) -> None:
        for delimiter in self._here:
            end = re.compile(rf"^\t*{re.escape(delimiter)}$\n?", re.MULTILINE).search(self._text, self._place)
            self._place = len(self._text) if end is None else end.end()
        self._here.clear()

    def _word_or_array(self) -> Iterator[Token]:
        is_remark = self._text.startswith("`#", self._place)
        word = self._word()
        following = self._text[self._place : self._place + 1]
        if is_remark and not word:
            return
        if following == "(" and (match := _ARRAY.fullmatch(word)):
            yield Array(match[1], bool(match[2]), tuple(self._elements()))
        elif not (following in ("<", ">") and word.isdigit()):  # 2>file
            yield word

    def _elements(self) -> Iterator[str]:
        self._place += 1
        while self._place < len(self._text) and self._text[self._place] != ")":
            if self._text[self._place] in "\n;&|<>(":
                self._place += 1
            elif self._text[self._place] in " \t\r#" or self._text.startswith("\\\n", self._place):
                self._skip_blanks()
            else:
                yield self._word()
        self._place += 1

    def _word(self) -> str:
        parts = []
        while self._place < len(self._text) and self._text[self._place] not in _ENDS:
            parts.append(self._piece())
        return "".join(parts)

    def _piece(self) -> str:
        """The next character, quoted part, or what begins with ``$``."""
        sign = self._text[self._place]
        if sign == "'":
            start, self._place = self._place + 1, self._found("'", 1) + 1
            self._check_closed(start - 1)
            return self._text[start : self._place - 1].replace("$", LITERAL)
        if sign == '"':
            return self._double_quoted()
        if sign == "\\":
            self._place += 2
            return self._text[self._place - 1 : self._place].replace("\n", "").replace("$", LITERAL)
        if quoted := _ANSI_QUOTED.match(self._text, self._place):
            self._place = quoted.end()
            return f"{QUOTED}{OUTPUT}" if "\\" in quoted[1] else quoted[1].replace("$", LITERAL)
        if sign in "$`":
            return self._replaced_part("$")
        if several := _BRACES.match(self._text, self._place):  # becomes several words
            self._place = several.end()
            return f"${OUTPUT}"
        self._place += 1
        return sign

    def _check_closed(self, start: int) -> None:
        """Raise if the quote that begins at ``start`` has taken the rest of the script."""
        if self._place > len(self._text) and self._depth == 0:
            raise UnclosedQuoteError(self._text.count("\n", 0, start) + 1)

    def _double_quoted(self) -> str:
        start = self._place
        self._place += 1
        parts = []
        while self._place < len(self._text) and self._text[self._place] != '"':
            sign, following = self._text[self._place], self._text[self._place + 1 : self._place + 2]
            if sign == "\\" and following and following in '$`"\\\n':
                parts.append(following.replace("\n", "").replace("$", LITERAL))
                self._place += 2
            elif sign in "$`":
                parts.append(self._replaced_part(QUOTED))
            else:
                parts.append(sign)
                self._place += 1
        self._place += 1
        self._check_closed(start)
        return "".join(parts)

    def _replaced_part(self, sign: str) -> str:
        """What a shell replaces: a variable, arithmetic, or what a command prints."""
        start = self._place
        if self._text[start] == "`":
            self._place = self._found("`", 1) + 1
            return "" if self._text.startswith("`#", start) else sign + OUTPUT  # of a comment: nothing
        opening = self._text[start + 1 : start + 2]
        if opening not in ("(", "{"):
            self._place += 1
            return sign
        self._place = self._closing(start + 1, opening)
        inside = self._text[start + 1 : self._place]
        if opening == "{":
            return sign + (_Reader(inside, self._depth + 1).unquoted() if self._depth < _DEEPEST else OUTPUT)
        if inside.startswith("((") and inside.endswith("))"):
            return f"{sign}{OPENS}{''.join(inside[2:-2].split())}{CLOSES}"
        return sign + OUTPUT

    def unquoted(self) -> str:
        """The whole text without its quotes: blanks and operators inside of braces are characters."""
        parts = []
        while self._place < len(self._text):
            at_sign = self._text[self._place] in "'\"\\$`"
            parts.append(self._piece() if at_sign else self._text[self._place])
            self._place += not at_sign
        return "".join(parts)

    def _closing(self, start: int, opening: str) -> int:
        """Behind what closes the parenthesis or brace at ``start``; quotes in it are skipped."""
        closes, depth, quote, place = {"(": ")", "{": "}"}[opening], 0, "", start
        while place < len(self._text):
            sign = self._text[place]
            if sign == "\\":
                place += 1
            elif quote:
                quote = "" if sign == quote else quote
            elif sign in "'\"":
                quote = sign
            else:
                depth += (sign == opening) - (sign == closes)
                if depth == 0:
                    return place + 1
            place += 1
        return len(self._text)

    def _found(self, sign: str, skipped: int = 0) -> int:
        """Where ``sign`` is next, or the text's end."""
        place = self._text.find(sign, self._place + skipped)
        return len(self._text) if place < 0 else place
