"""Render the measurements as tables."""

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.report import table
from benchmarks.trainer.measure import Figures

_COLUMNS = (
    "model | tokens a pack | trained by | recompute | tokens/s | forward + backward (s) | optimizer (s) | "
    "of the ceiling, forward + backward | of the ceiling, step | peak memory (GiB) | planned (GiB) | score (s) | "
    "processor (s) | start (s) | gradient norm"
)

_OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True, slots=True)
class Workload:
    """The data of one step.

    Attributes:
        shape: name of the model.
        pack_tokens, packs: tokens per pack, and number of packs.
        tokens: number of real tokens in the step.
        flops: FLOPs of forward and backward.
        longest_prompt, longest_response: lengths in tokens.
    """

    shape: str
    pack_tokens: int
    packs: int
    tokens: int
    flops: float
    longest_prompt: int
    longest_response: int


@dataclass(frozen=True, slots=True)
class Row:
    """One side's figures.

    Attributes:
        figures: ``None`` if the side ran out of memory or failed.
        planned_bytes: peak according to ``slime-like plan``; None for Hugging Face's sides.
        failed: how it failed.
    """

    workload: Workload
    side: str
    recompute: str
    figures: Figures | None
    planned_bytes: int | None = None
    failed: str | None = None

    @property
    def summary(self) -> str:
        """Return the row as one line."""
        work = self.workload
        named = f"{work.shape}, packs of {work.pack_tokens:,}, {self.side}, recompute {self.recompute}"
        if self.figures is None:
            return f"{named}: {self.failed or _OUT_OF_MEMORY}"
        return f"{named}: {work.tokens / self.figures.step_s:,.0f} tokens/s"


def render(rows: Sequence[Row], ceiling: float) -> str:
    """Render a Markdown table; ``ceiling`` is the FLOP/s of matrix products."""
    return table(_COLUMNS, [_cells(row, ceiling) for row in rows])


def _cells(row: Row, ceiling: float) -> list[str]:
    work, figures = row.workload, row.figures
    named = [work.shape, f"{work.pack_tokens:,}", row.side, row.recompute]
    if figures is None:
        return [*named, row.failed or _OUT_OF_MEMORY, *[""] * (_COLUMNS.count("|") - len(named))]
    return [
        *named,
        f"{work.tokens / figures.step_s:,.0f}",
        f"{figures.forward_backward_s:.3f}",
        f"{figures.update_s:.3f}",
        f"{work.flops / figures.forward_backward_s / ceiling:.1%}",
        f"{work.flops / figures.step_s / ceiling:.1%}",
        f"{figures.peak_bytes / 2**30:.2f}",
        "" if row.planned_bytes is None else f"{row.planned_bytes / 2**30:.2f}",
        f"{figures.score_s:.3f}",
        f"{figures.processor_s:.3f}",
        f"{figures.start_s:.1f}",
        f"{figures.grad_norm:.4g}",
    ]
