"""Distribution of responses' lengths, from a mean and a maximum, a file, or the metrics of a run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from slime_like.errors import ConfigError
from slime_like.observability.metrics import METRICS_FILE, read_metrics

_MEAN, _LONGEST = "rollout/response_length_mean", "rollout/response_length_max"


@dataclass(frozen=True, slots=True)
class Lengths:
    """Distribution of the tokens of responses: observed ones, or else an exponential distribution that is cut at the
    longest, where the rest of it ends, like responses that reach their limit.

    Attributes:
        mean, longest: tokens.
        observed: sorted tokens of observed responses.
    """

    mean: float
    longest: float
    observed: tuple[int, ...] = ()

    @classmethod
    def of(cls, observed: Sequence[int]) -> Self:
        return cls(sum(observed) / len(observed), max(observed), tuple(sorted(observed)))

    def spread(self, count: int) -> list[float]:
        """Return the tokens of ``count`` responses, in increasing order: quantiles at equal distances."""
        shares = [(index + 0.5) / count for index in range(count)]
        if self.observed:
            return [float(self.observed[int(share * len(self.observed))]) for share in shares]
        scale = self._scale
        return [min(self.longest, -scale * math.log1p(-share)) for share in shares]

    @property
    def square(self) -> float:
        """Mean of the squared tokens."""
        if self.observed:
            return sum(length * length for length in self.observed) / len(self.observed)
        scale, longest = self._scale, self.longest
        if math.isinf(scale):
            return longest**2
        return 2 * scale * (scale - (scale + longest) * math.exp(-longest / scale))

    @property
    def _scale(self) -> float:
        """Scale s of the exponential distribution: its mean, cut at m, is s (1 - exp(-m / s))."""
        if self.mean > 0.99 * self.longest:
            return math.inf
        low, high = self.mean, self.longest**2 / (self.longest - self.mean)
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if -middle * math.expm1(-self.longest / middle) < self.mean else (low, middle)
        return high


def read_lengths(path: Path) -> Lengths:
    """Read a file with a response's tokens per line, or the mean and the longest of all steps of a run directory.

    Raises:
        ConfigError: there is no such file, or it contains something else.
    """
    if path.is_dir():
        rows = [row for row in read_metrics(path / METRICS_FILE) if _MEAN in row and _LONGEST in row]
        if not rows:
            problem = f"--lengths {path}: {METRICS_FILE} has no steps with {_MEAN} and {_LONGEST}"
            raise ConfigError(f"{problem}; give a run that has sampled, or a file", code="lengths-unreadable")
        return Lengths(sum(row[_MEAN] for row in rows) / len(rows), max(row[_LONGEST] for row in rows))
    try:
        found = [int(line) for line in path.read_text(encoding="utf-8").split()]
    except (OSError, ValueError) as error:
        remedy = "give a text file with the tokens of a response on every line, or a run directory"
        raise ConfigError(f"--lengths {path}: {error}; {remedy}", code="lengths-unreadable") from error
    if not found or min(found) < 1:
        problem = "has no lengths" if not found else f"has the length {min(found)}"
        raise ConfigError(f"--lengths {path} {problem}; every response has a token", code="lengths-unreadable")
    return Lengths.of(found)
