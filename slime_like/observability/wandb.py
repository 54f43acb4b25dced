"""Weights & Biases as a tracker of metrics."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slime_like.config import LoggingConfig
from slime_like.observability.metrics import WANDB_ID


class WandbTracker:
    """Tracker that logs to one Weights & Biases run, named like the run directory.

    The directory keeps the run's id, so later starts continue it. W&B ignores steps that it has already.
    """

    def __init__(self, config: LoggingConfig, run_dir: Path) -> None:
        import wandb  # an extra, which this module does not need to be found

        kept = run_dir / WANDB_ID
        self._table = wandb.Table
        self._run: Any = wandb.init(
            project=config.wandb_project,
            entity=config.wandb_entity,
            group=config.wandb_group,
            tags=config.wandb_tags or None,
            name=run_dir.name,
            dir=str(run_dir),
            id=kept.read_text(encoding="utf-8") if kept.exists() else None,
            resume="allow",
        )
        kept.write_text(self._run.id, encoding="utf-8")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def log_table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        table = self._table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self._run.log({name: table}, step=step)

    def close(self) -> None:
        self._run.finish()
