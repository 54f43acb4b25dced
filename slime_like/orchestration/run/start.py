"""Start of a run: from its first step, or from a checkpoint."""

from slime_like.config import RunConfig
from slime_like.data.prompts import PromptSource
from slime_like.interfaces import TrainerBackend
from slime_like.orchestration.run.directory import find_checkpoint, make_run_dir, record_settings
from slime_like.orchestration.run.lock import RunLock
from slime_like.orchestration.run.run import Run
from slime_like.orchestration.trainer.checkpoints import Checkpoint


class Start:
    """Start from step 1, with the weights of ``model``.

    Attributes:
        finished_steps: steps of the checkpoint that the run resumes from; 0 without one.
    """

    finished_steps = 0

    def __init__(self, config: RunConfig) -> None:
        self._config = config

    def position(self, prompts: PromptSource, *files: str) -> None:
        """Move ``prompts`` to where they go on; ``files`` must be there. Rejects what does not fit."""

    def make_directory(self, lock: RunLock) -> None:
        make_run_dir(self._config, None, lock)

    def restore(self, run: Run) -> None:
        """Load all state into ``run``, before its first step."""


class ResumedStart(Start):
    """Start from a checkpoint."""

    def __init__(self, config: RunConfig, checkpoint: Checkpoint) -> None:
        super().__init__(config)
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
        run.trainers.ranks.call("loading a checkpoint", TrainerBackend.load, checkpoint.trainer)
        run.reference.restore(checkpoint)
        run.progress.note(f"resumed from {checkpoint.path} after step {checkpoint.step}")
        if changed := record_settings(self._config, checkpoint):
            run.progress.note(f"settings that differ from the earlier start: {'; '.join(changed)}")


def start_of(config: RunConfig) -> Start:
    """Return the start that ``resume`` selects; see ``find_checkpoint``."""
    checkpoint = find_checkpoint(config)
    return Start(config) if checkpoint is None else ResumedStart(config, checkpoint)
