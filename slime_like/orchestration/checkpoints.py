"""Checkpoints of a run: written under a temporary name, whole before they are visible, committed by one rename."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_like.errors import CheckpointError
from slime_like.orchestration.trainer_group import TrainerGroup

_TRAINER, _STATE, _PARTIAL = "trainer", "state.json", ".partial-"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint on disk: what to hand to the trainers, and what the driver remembers."""

    path: Path
    step: int
    state: dict[str, Any]

    @property
    def trainer(self) -> Path:
        return self.path / _TRAINER

    @property
    def data_position(self) -> dict[str, Any]:
        """Where the prompts go on.

        Raises:
            CheckpointError: the run that wrote it read no prompts, but kept rollouts.
        """
        if "data" not in self.state:
            raise CheckpointError(
                f"resume: {self.path} is of a run on kept rollouts and has no position in data.train; resume it with "
                "debug.load_rollouts, or start from its Hugging Face export"
            )
        position: dict[str, Any] = self.state["data"]
        return position

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        """Open the checkpoint at ``path``.

        Raises:
            CheckpointError: it is missing, or its state cannot be read; the message says what to do.
        """
        file = path / _STATE
        if not path.is_dir():
            raise CheckpointError(f"resume: {path} is no checkpoint (no directory); give another path")
        try:
            state = json.loads(file.read_text(encoding="utf-8"))
            return cls(path.resolve(), int(state["step"]), state)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"resume: {path} is no checkpoint ({_STATE} is missing); give another path"
            ) from error
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"resume: {file} is damaged ({error}); resume from an older checkpoint in {path.parent}"
            ) from error


class CheckpointStore:
    """``RUN_DIR/checkpoints/step-N`` with a ``latest`` link; a killed save never damages an older checkpoint.

    Args:
        run_dir: the run's directory.
        keep: newest checkpoints that stay after a save.
    """

    def __init__(self, run_dir: Path, keep: int) -> None:
        self._root = run_dir / "checkpoints"
        self._keep = keep
        self._also: dict[str, Callable[[Path], None]] = {}
        for partial in self._root.glob(f"{_PARTIAL}*"):  # a save that was killed
            shutil.rmtree(partial)

    def also_write(self, write: Callable[[Path], None], name: str) -> None:
        """From now on, ``write`` the file ``name`` into every checkpoint."""
        self._also[name] = write

    def save(self, step: int, trainers: TrainerGroup, state: dict[str, Any]) -> Path:
        """Write step ``step``; ``state`` (JSON) holds what the driver must remember, such as the data position.

        Raises:
            CheckpointError: the disk refused; what was written is removed, older checkpoints are untouched.
        """
        final = self._root / f"step-{step:06d}"
        partial = self._root / f"{_PARTIAL}{final.name}"
        try:
            partial.mkdir(parents=True)
            trainers.save(partial / _TRAINER)
            (partial / _STATE).write_text(json.dumps({"step": step, **state}, indent=1), encoding="utf-8")
            for name, write in self._also.items():
                write(partial / name)
            shutil.rmtree(final, ignore_errors=True)  # the same step of an earlier start
            partial.rename(final)
            self._point_latest(final)
        except OSError as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise CheckpointError(f"checkpoint of step {step}: could not write to {self._root}: {error}") from error
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        self._remove_old()
        return final

    def _point_latest(self, final: Path) -> None:
        link = self._root / ".latest-new"
        link.unlink(missing_ok=True)
        link.symlink_to(final.name)
        link.replace(self._root / "latest")

    def _remove_old(self) -> None:
        for old in sorted(self._root.glob("step-*"))[: -self._keep]:
            shutil.rmtree(old)
