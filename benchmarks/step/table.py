"""Tables that compare both systems."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from benchmarks.step.measurement import PARTS, Measurement

GOALS = {4: 2.0, 64: 0.65, 256: 0.35}
"""Maps the limit on new tokens to our goal for the ratio of our time to TRL's."""


@dataclass(frozen=True, slots=True)
class Round:
    """Measurements of both systems on one workload, one right after the other.

    Attributes:
        ours, trl: measurements of the steady steps.
    """

    ours: Measurement
    trl: Measurement

    @property
    def ratio(self) -> float:
        """Our seconds per step divided by TRL's: we are faster if it is below 1."""
        return self.ours.step_s / self.trl.step_s


@dataclass(frozen=True, slots=True)
class Comparison:
    """One workload, measured on both systems in turns.

    Attributes:
        max_new_tokens: length limit of a response.
        rounds: at least one. If the machine's speed drifts, compare seconds only within a round.
    """

    max_new_tokens: int
    rounds: Sequence[Round]

    @property
    def ratio(self) -> float:
        """Median of the rounds' ratios."""
        return median(self._ratios)

    @property
    def ratio_range(self) -> tuple[float, float]:
        """Smallest and largest ratio of a round."""
        return min(self._ratios), max(self._ratios)

    @property
    def _ratios(self) -> list[float]:
        return [each.ratio for each in self.rounds]

    @property
    def verdict(self) -> str:
        """Return "yes" or "NO" for this length's goal, or a dash if there is none."""
        goal = GOALS.get(self.max_new_tokens)
        return "-" if goal is None else "yes" if self.ratio <= goal else "NO"

    def median_of(self, figure: Callable[[Round], float]) -> float:
        """Return the median of one value over the rounds."""
        return median(map(figure, self.rounds))


def render(comparisons: Sequence[Comparison]) -> str:
    """Render two Markdown tables: both systems' steps, and the phases of ours."""
    return "\n".join([*_side_by_side(comparisons), "", *_parts(comparisons)])


def _side_by_side(comparisons: Sequence[Comparison]) -> list[str]:
    lines = [
        "| new tokens, up to | mean length, ours | TRL | step, ours (s) | TRL (s) | ratio | of rounds | goal | met |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for each in comparisons:
        goal, (least, most) = GOALS.get(each.max_new_tokens), each.ratio_range
        cells = [
            str(each.max_new_tokens),
            f"{fmean(one.ours.response_length for one in each.rounds):.1f}",
            f"{fmean(one.trl.response_length for one in each.rounds):.1f}",
            f"{each.median_of(lambda one: one.ours.step_s):.3f}",
            f"{each.median_of(lambda one: one.trl.step_s):.3f}",
            f"{each.ratio:.2f}",
            f"{least:.2f} to {most:.2f}",
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
        seconds = [median(one.ours.parts[part] for one in each.rounds) for part in PARTS]
        lines.append(f"| {each.max_new_tokens} | {' | '.join(f'{value:.3f}' for value in seconds)} |")
    return lines
