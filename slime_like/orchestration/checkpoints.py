"""Checkpoints of a run: written under a temporary name, whole before they are visible, committed by one rename."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from slime_like.errors import CheckpointError
from slime_like.orchestration.trainer_group import TrainerGroup


class CheckpointStore:
    """``RUN_DIR/checkpoints/step-N`` with a ``latest`` link; a killed save never damages an older checkpoint."""

    def __init__(self, run_dir: Path) -> None:
        self._root = run_dir / "checkpoints"

    def save(self, step: int, trainers: TrainerGroup, state: dict[str, Any]) -> Path:
        """Write step ``step``; ``state`` (JSON) holds what the driver must remember, such as the data position.

        Raises:
            CheckpointError: the disk refused; what was written is removed, older checkpoints are untouched.
        """
        final = self._root / f"step-{step:06d}"
        partial = self._root / f".partial-step-{step:06d}"
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            trainers.save(partial / "trainer")
            (partial / "state.json").write_text(json.dumps({"step": step, **state}, indent=1), encoding="utf-8")
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
            self._point_latest(final)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(f"checkpoint of step {step}: could not write to {self._root}: {error}") from error
        return final

    def _point_latest(self, final: Path) -> None:
        link = self._root / ".latest-new"
        link.unlink(missing_ok=True)
        link.symlink_to(final.name)
        link.replace(self._root / "latest")
