"""A reference that follows the policy (``reference.update_interval``): refreshed, handed to whoever scores, resumed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from slime_like.config import RunConfig
from slime_like.errors import CheckpointError
from slime_like.orchestration.rollout.reference_pool import ReferencePool
from slime_like.orchestration.trainer.checkpoints import Checkpoint, link_tree
from slime_like.orchestration.trainer.group import TrainerGroup

REFERENCE = "reference"
"""Name of the directory, in a run's and in a checkpoint's."""
_PARTIAL = ".partial"
_STEP = "reference_step"


class MovingReference:
    """Every ``reference.update_interval`` steps, the policy of that moment becomes the reference.

    Its weights are written to ``RUN_DIR/reference/step-N``, and whoever scores, trainer ranks or reference workers,
    reads them from there: so they have the very weights that a resumed run or a restarted worker will have. Checkpoints
    hold links to these files.

    Args:
        trainers: hold the policy, and the reference where there is no ``pool``.
        pool: the reference workers, if there are any.

    Attributes:
        step: after which the reference was refreshed last; ``None`` while it is the one that the run began with.
    """

    def __init__(self, config: RunConfig, trainers: TrainerGroup, pool: ReferencePool | None) -> None:
        self._interval = config.reference.update_interval
        self._in_use = config.reference_in_trainer or pool is not None
        self._trainers = trainers
        self._pool = pool
        self._root = config.run_dir / REFERENCE
        self.step: int | None = None

    def refresh(self, step: int) -> None:
        """Training step ``step`` has been made: where a refresh is due, what is scored from now on is by its weights.

        Raises:
            CheckpointError: the disk refused.
        """
        if not self._in_use or not self._interval or step % self._interval:
            return
        partial = self._root / _PARTIAL
        shutil.rmtree(partial, ignore_errors=True)  # of a start that was killed
        self._trainers.save_weights(partial)
        self._adopt(partial, step)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must remember beside ``files``; expressible in JSON."""
        return {_STEP: self.step}

    def files(self) -> Path | None:
        """What a checkpoint must hold; ``None`` while nothing has been refreshed."""
        return None if self.step is None else self._place(self.step)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Take the reference that the checkpoint's run had then.

        Raises:
            CheckpointError: its weights are missing, or damaged.
        """
        step = checkpoint.state.get(_STEP)
        if step is None or not self._in_use:
            return
        source, partial = checkpoint.path / REFERENCE, self._root / _PARTIAL
        if not source.is_dir():
            raise CheckpointError(
                f"resume: {source} is missing, the reference's weights since step {step}; resume from an older "
                f"checkpoint in {checkpoint.path.parent}"
            )
        shutil.rmtree(partial, ignore_errors=True)
        link_tree(source, partial)
        self._adopt(partial, step)

    def _adopt(self, written: Path, step: int) -> None:
        place = self._place(step)
        shutil.rmtree(place, ignore_errors=True)  # the same step of an earlier start
        written.rename(place)
        if self._pool is not None:
            self._pool.weights.use(place)
        else:
            self._trainers.load_weights(place, "reference")
        self.step = step
        self._remove_others(place)

    def _remove_others(self, place: Path) -> None:
        kept = {place} | (self._pool.weights.in_use() if self._pool is not None else set())
        for other in self._root.glob("step-*"):
            if other not in kept:
                shutil.rmtree(other)

    def _place(self, step: int) -> Path:
        return self._root / f"step-{step:06d}"
