"""How a run starts: from its first step, or from a checkpoint."""

from __future__ import annotations

from typing import Protocol

from slime_like.config import RunConfig
from slime_like.data.prompts import PromptSource
from slime_like.interfaces import TrainerBackend
from slime_like.orchestration.run.directory import find_checkpoint, make_run_dir, record_settings
from slime_like.orchestration.run.lock import RunLock
from slime_like.orchestration.run.run import Run
from slime_like.orchestration.trainer.checkpoints import Checkpoint


class Start(Protocol):
    """Where a run begins."""

    @property
    def finished_steps(self) -> int:
        """Steps that are behind it."""

    def position(self, prompts: PromptSource, *files: str) -> None:
        """Move ``prompts`` to where they go on; ``files`` must be there. What does not fit is refused here."""

    def make_directory(self, lock: RunLock) -> None:
        """See ``make_run_dir``."""

    def restore(self, run: Run) -> None:
        """Load all state into ``run``, before its first step."""


class NewStart:
    """From step 1, with the weights of ``model``."""

    finished_steps = 0

    def __init__(self, config: RunConfig) -> None:
        self._config = config

    def position(self, prompts: PromptSource, *files: str) -> None: ...

    def make_directory(self, lock: RunLock) -> None:
        make_run_dir(self._config, None, lock)

    def restore(self, run: Run) -> None: ...


class ResumedStart:
    """From a checkpoint."""

    def __init__(self, config: RunConfig, checkpoint: Checkpoint) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self.finished_steps = checkpoint.step

    def position(self, prompts: PromptSource, *files: str) -> None:
        prompts.load_state_dict(self._checkpoint.data_position())
        for name in files:
            self._checkpoint.file(name)

    def make_directory(self, lock: RunLock) -> None:
        make_run_dir(self._config, self._checkpoint, lock)

    def restore(self, run: Run) -> None:
        checkpoint = self._checkpoint
        run.rollout.restore(checkpoint)
        run.trainers.call("loading a checkpoint", TrainerBackend.load, checkpoint.trainer)
        run.reference.restore(checkpoint)
        run.progress.note(f"resumed from {checkpoint.path} after step {checkpoint.step}")
        if changed := record_settings(self._config, checkpoint):
            run.progress.note(f"settings that differ from the earlier start: {'; '.join(changed)}")


def start_of(config: RunConfig) -> Start:
    """What ``resume`` asks for; see ``find_checkpoint``."""
    checkpoint = find_checkpoint(config)
    return NewStart(config) if checkpoint is None else ResumedStart(config, checkpoint)
