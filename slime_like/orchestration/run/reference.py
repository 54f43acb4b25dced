"""The run's reference: refresh from the policy (``reference.update_interval``), handover and resumption."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime_like.config.roles import REFERENCE
from slime_like.orchestration.trainer.checkpoint import Checkpoint
from slime_like.orchestration.trainer.model_ranks import ModelRanks
from slime_like.orchestration.trainer.rank import TrainerRank
from slime_like.system.disk import link_tree

if TYPE_CHECKING:
    from slime_like.orchestration.rollout.roles import RoleQueue

_PARTIAL = ".partial"
_STEP = "reference_step"


class Reference:
    """Reference that the policy replaces every ``interval`` steps. 0 keeps the first reference.

    Its weights are written to ``RUN_DIR/reference/step-N``. Trainer ranks or reference workers read them from there, so
    a resumed run or a restarted worker has the same weights. Checkpoints hold links to these files.

    Args:
        interval: ``reference.update_interval``; ``None`` in a run without a reference, which does nothing.
        policy: its ranks, which without a pool of workers hold the reference, too.

    Attributes:
        step: step of the last refresh; ``None`` while the run still has its first reference.
    """

    def __init__(self, run_dir: Path, interval: int | None, policy: ModelRanks, pools: Sequence[RoleQueue]) -> None:
        self._interval = interval
        self._policy = policy
        self._pool = next((pool for pool in pools if pool.role == REFERENCE), None)
        self._root = run_dir / REFERENCE
        self.step: int | None = None

    def refresh(self, step: int) -> None:
        """Replace the reference with the weights after training step ``step``, if a refresh is due.

        Raises:
            CheckpointError: the disk refused.
        """
        if not self._interval or step % self._interval:
            return
        partial = self._root / _PARTIAL
        shutil.rmtree(partial, ignore_errors=True)  # left by a killed start
        self._policy.call("saving weights", TrainerRank.save_weights, partial)
        self._adopt(partial, step)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that checkpoints save besides ``files``; expressible in JSON."""
        return {_STEP: self.step}

    def files(self) -> Path | None:
        """Return the directory that checkpoints must hold, or ``None`` before the first refresh."""
        return None if self.step is None else self._place(self.step)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Restore the reference from the checkpoint.

        Raises:
            CheckpointError: its weights are missing or damaged.
        """
        step = checkpoint.state.get(_STEP)
        if step is None or self._interval is None:
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
        kept = {place}
        if self._pool is None:
            self._policy.call("loading the reference weights", TrainerRank.load_weights, place, REFERENCE)
        else:
            self._pool.use(place)
            kept |= self._pool.in_use()
        self.step = step
        for other in self._root.glob("step-*"):
            if other not in kept:
                shutil.rmtree(other)

    def _place(self, step: int) -> Path:
        return self._root / f"step-{step:06d}"
