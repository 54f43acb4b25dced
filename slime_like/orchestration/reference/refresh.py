"""A reference that follows the policy (``reference.update_interval``): refresh, hand-over, resumption."""

import shutil
from pathlib import Path
from typing import Any, Protocol

from slime_like.config import RunConfig
from slime_like.interfaces import TrainerBackend
from slime_like.orchestration.rollout.reference_pool import ReferencePool
from slime_like.orchestration.trainer.checkpoints import Checkpoint, link_tree
from slime_like.orchestration.trainer.group import TrainerGroup

REFERENCE = "reference"
"""Name of the directory, in a run's and in a checkpoint's."""
_PARTIAL = ".partial"
_STEP = "reference_step"


class WeightsUser(Protocol):
    """Interface of what scores with the reference's weights: reference workers or trainer ranks."""

    def use(self, weights: Path) -> None:
        """Score with the weights in this directory from now on."""

    def in_use(self) -> set[Path]:
        """Directories that are still read."""


class TrainerReference:
    """The reference that trainer ranks hold beside the policy."""

    def __init__(self, trainers: TrainerGroup) -> None:
        self._trainers = trainers

    def use(self, weights: Path) -> None:
        self._trainers.ranks.call("loading the reference weights", TrainerBackend.load_weights, weights, "reference")

    def in_use(self) -> set[Path]:
        return set()  # they are read before ``use`` returns


class Reference:
    """Null object of a run without a reference."""

    def refresh(self, step: int) -> None:
        """Replace the reference by the weights after training step ``step``, where a refresh is due.

        Raises:
            CheckpointError: the disk refused.
        """

    def state_dict(self) -> dict[str, Any]:
        """State for checkpoints besides ``files``; expressible in JSON."""
        return {_STEP: None}

    def files(self) -> Path | None:
        """Directory that checkpoints must hold; ``None`` before the first refresh."""

    def restore(self, checkpoint: Checkpoint) -> None:
        """Take the reference that the checkpoint's run had then.

        Raises:
            CheckpointError: its weights are missing, or damaged.
        """


def reference_of(config: RunConfig, trainers: TrainerGroup, pool: ReferencePool | None = None) -> Reference:
    """The run's reference.

    Args:
        trainers: hold the policy, and the reference where there is no ``pool``.
    """
    if pool is None and not config.reference_in_trainer:
        return Reference()
    return MovingReference(config, trainers, TrainerReference(trainers) if pool is None else pool.weights)


class MovingReference(Reference):
    """Reference that is replaced by the policy every ``reference.update_interval`` steps; 0 keeps the first.

    Its weights are written to ``RUN_DIR/reference/step-N``, and trainer ranks or reference workers read them from
    there: so they have the very weights that a resumed run or a restarted worker will have. Checkpoints hold links to
    these files.

    Attributes:
        step: after which the reference was refreshed last; ``None`` while it is the one that the run began with.
    """

    def __init__(self, config: RunConfig, trainers: TrainerGroup, user: WeightsUser) -> None:
        self._interval = config.reference.update_interval
        self._trainers = trainers
        self._user = user
        self._root = config.run_dir / REFERENCE
        self.step: int | None = None

    def refresh(self, step: int) -> None:
        if not self._interval or step % self._interval:
            return
        partial = self._root / _PARTIAL
        shutil.rmtree(partial, ignore_errors=True)  # of a start that was killed
        self._trainers.ranks.call("saving weights", TrainerBackend.save_weights, partial)
        self._adopt(partial, step)

    def state_dict(self) -> dict[str, Any]:
        return {_STEP: self.step}

    def files(self) -> Path | None:
        return None if self.step is None else self._place(self.step)

    def restore(self, checkpoint: Checkpoint) -> None:
        step = checkpoint.state.get(_STEP)
        if step is None:
            return
        source, partial = checkpoint.path / REFERENCE, self._root / _PARTIAL
        if not source.is_dir():
            problem = f"{source} is missing, the reference's weights since step {step}"
            raise checkpoint.unusable(problem, "checkpoint-incomplete")
        shutil.rmtree(partial, ignore_errors=True)
        link_tree(source, partial)
        self._adopt(partial, step)

    def _adopt(self, written: Path, step: int) -> None:
        place = self._place(step)
        shutil.rmtree(place, ignore_errors=True)  # the same step of an earlier start
        written.rename(place)
        self._user.use(place)
        self.step = step
        self._remove_others(place)

    def _remove_others(self, place: Path) -> None:
        kept = {place} | self._user.in_use()
        for other in self._root.glob("step-*"):
            if other not in kept:
                shutil.rmtree(other)

    def _place(self, step: int) -> Path:
        return self._root / f"step-{step:06d}"
