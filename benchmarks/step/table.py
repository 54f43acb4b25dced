"""Both systems side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.step.measurement import PARTS, Measurement

GOALS = {4: 2.0, 64: 0.5, 256: 0.25}
"""Up to so many new tokens: the largest ratio, ours to TRL's, that we aim at."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One workload, measured on both systems.

    Attributes:
        max_new_tokens: length limit of a response.
        ours, trl: their steady steps.
    """

    max_new_tokens: int
    ours: Measurement
    trl: Measurement

    @property
    def ratio(self) -> float:
        """Our seconds of a step over TRL's: below 1 we are faster."""
        return self.ours.step_s / self.trl.step_s

    @property
    def verdict(self) -> str:
        """If the goal of this length is met; a dash where there is none."""
        goal = GOALS.get(self.max_new_tokens)
        return "-" if goal is None else "yes" if self.ratio <= goal else "NO"


def render(comparisons: Sequence[Comparison]) -> str:
    """Two Markdown tables: steps side by side, and what ours consist of."""
    return "\n".join([*_side_by_side(comparisons), "", *_parts(comparisons)])


def _side_by_side(comparisons: Sequence[Comparison]) -> list[str]:
    lines = [
        "| new tokens, up to | mean length, ours | TRL | step, ours (s) | TRL (s) | ratio | goal | met |",
        "|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for each in comparisons:
        goal = GOALS.get(each.max_new_tokens)
        cells = [
            str(each.max_new_tokens),
            f"{each.ours.response_length:.1f}",
            f"{each.trl.response_length:.1f}",
            f"{each.ours.step_s:.3f}",
            f"{each.trl.step_s:.3f}",
            f"{each.ratio:.2f}",
            "-" if goal is None else f"{goal:.2f}",
            each.verdict,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _parts(comparisons: Sequence[Comparison]) -> list[str]:
    lines = [
        f"| new tokens, up to | {' | '.join(f'{part} (s)' for part in PARTS)} |",
        f"|{'---:|' * (len(PARTS) + 1)}",
    ]
    for each in comparisons:
        cells = " | ".join(f"{each.ours.parts[part]:.3f}" for part in PARTS)
        lines.append(f"| {each.max_new_tokens} | {cells} |")
    return lines
