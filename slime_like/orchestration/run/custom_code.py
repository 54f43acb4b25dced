"""Custom code of a run: its source files' digests, kept in checkpoints, show what has changed before a resume."""

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from slime_like.config import RunConfig
from slime_like.orchestration.trainer.checkpoint import CUSTOM_CODE, Checkpoint
from slime_like.plugins.source import source_file

_OF_LOSS = ("algorithm.loss", "algorithm.advantage", "algorithm.kl_estimator", "algorithm.importance_correction")
_OF_ROLLOUT = ("rollout.environment.name", "rollout.agent.name")
_DIGITS = 16


class _Source(NamedTuple):
    file: Path
    digest: str


class CustomCode:
    """Functions that a run's settings name, and the digests of the files that define them, as the run starts.

    What these files import has none.
    """

    def __init__(self, config: RunConfig) -> None:
        self._names = {field: name for field, name in _names(config) if ":" in name}
        self._sources = {name: source for name in self._names.values() if (source := _read(name)) is not None}

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps, by the function's import path."""
        return {CUSTOM_CODE: {name: source.digest for name, source in self._sources.items()}}

    def changes(self, checkpoint: Checkpoint) -> Iterator[str]:
        """Functions whose source is not what it was when the checkpoint's run was started; a checkpoint of another
        version keeps none."""
        before = checkpoint.state.get(CUSTOM_CODE, {})
        for field, name in self._names.items():
            source = self._sources.get(name)
            if source is not None and before.get(name, source.digest) != source.digest:
                function = name.rpartition(":")[2]
                yield f"{field}: {function} ({source.file}): its source has changed since step {checkpoint.step}"


def _names(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Fields whose code this run calls, with their values."""
    fields = list(_OF_LOSS)
    if not config.supervised and config.debug.load_rollouts is None:
        fields += _OF_ROLLOUT
        for index, function in enumerate(config.reward.functions):
            yield f"reward.functions.{index}", function.name
    for field in fields:
        if (name := attrgetter(field)(config)) is not None:
            yield field, name


def _read(name: str) -> _Source | None:
    if (file := source_file(name)) is not None:
        with suppress(OSError):
            return _Source(file, hashlib.sha256(file.read_bytes()).hexdigest()[:_DIGITS])
    return None
