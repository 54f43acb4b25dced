"""The closing summary of a run."""

from dataclasses import asdict, dataclass
from pathlib import Path

from slime_like.config import RunConfig
from slime_like.observability.metrics import read_metrics, series
from slime_like.observability.names import ACCURACY
from slime_like.orchestration.run.directory import write_summary


@dataclass(frozen=True, slots=True)
class TrainSummary:
    """Closing figures of a finished run.

    Attributes:
        accuracy_before, accuracy_after: held-out accuracy before the first and after the last step; ``None`` without
            evaluation.
        tokens_per_second: response tokens trained on per second of training steps.
        wall_s: the whole run, start-up included.
    """

    accuracy_before: float | None
    accuracy_after: float | None
    tokens_per_second: float
    wall_s: float
    files: dict[str, Path]


def summarise(config: RunConfig, files: dict[str, Path], tokens_per_second: float, wall_s: float) -> TrainSummary:
    """Return the summary, and write it into the run directory."""
    accuracies = series(read_metrics(files["metrics"]), ACCURACY)[1]  # also those of before a resume
    summary = TrainSummary(
        accuracy_before=accuracies[0] if accuracies else None,
        accuracy_after=accuracies[-1] if accuracies else None,
        tokens_per_second=tokens_per_second,
        wall_s=wall_s,
        files=files,
    )
    figures = asdict(summary)
    write_summary(config, figures | {"files": {name: str(path) for name, path in files.items()}})
    return summary
