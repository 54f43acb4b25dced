"""The parity table, for people."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console
from rich.table import Table

from slime_like.verification.comparison import Parity

_WIDTH = 120
_FIGURES = (
    ("logprobs (max)", "logprob_max"),
    ("(mean)", "logprob_mean"),
    ("loss", "loss"),
    ("grad norm", "grad_norm"),
    ("gradients", "gradients"),
    ("weights", "weights"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One layout's line: its deviation, why it does not fit the model or the machine, or what stopped it."""

    layout: str
    ranks: int
    parity: Parity | None = None
    skipped: str | None = None
    failed: str | None = None

    @property
    def verdict(self) -> str:
        if self.parity is None:
            return "FAILED" if self.skipped is None else "skipped"
        return "DIFFERS" if self.parity.differences else "same"

    @property
    def sentences(self) -> list[str]:
        return [*filter(None, (self.skipped, self.failed)), *(self.parity.differences if self.parity else ())]


def print_table(title: str, rows: Sequence[Row], stream: TextIO | None = None) -> None:
    """The table, then a line for every difference, failure and omission."""
    stream = stream or sys.stdout
    console = Console(file=stream, width=None if stream.isatty() else _WIDTH, highlight=False, soft_wrap=False)
    table = Table(title=title, title_justify="left", caption_justify="left")
    table.add_column("layout", no_wrap=True)
    table.add_column("ranks", justify="right", no_wrap=True)
    for heading, _ in _FIGURES:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    for row in rows:
        figures = ["" if row.parity is None else f"{getattr(row.parity, name):.1e}" for _, name in _FIGURES]
        table.add_row(row.layout, str(row.ranks), *figures, row.verdict)
    console.print(table)
    for row in rows:
        for sentence in row.sentences:
            stream.write(f"{row.layout}: {sentence}\n")
    stream.flush()
