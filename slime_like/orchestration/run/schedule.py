"""Schedule: after which steps evaluation, checkpoints, tables and memory figures are due. Pure."""

from slime_like.config import RunConfig

# Asking every rank for its memory costs a round trip; peaks do not change every step.
_MEMORY_EVERY = 10


class Schedule:
    """Schedule of what is due after a step, counted from 1."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config

    def evaluates(self, step: int) -> bool:
        """Held-out accuracy is due."""
        return self._is_due(step, self._config.evaluation.every)

    def saves(self, step: int) -> bool:
        """A checkpoint is due."""
        return self._is_due(step, self._config.checkpoint.every)

    def shows_tables(self, step: int) -> bool:
        """Tables of samples are due."""
        debug = self._config.debug
        return debug.samples_per_step > 0 and (step == 1 or step % debug.tables_every == 0)

    def measures_memory(self, step: int) -> bool:
        """The ranks' peak memory is due."""
        return step % _MEMORY_EVERY == 1

    def _is_due(self, step: int, every: int) -> bool:
        return step == self._config.steps or (every > 0 and step % every == 0)
