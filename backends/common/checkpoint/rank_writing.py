"""A rank's own part of writing a checkpoint: at once, or in a thread behind the rank's back."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from pathlib import Path

import torch.distributed as dist

from slime_like.errors import CheckpointError


class RankWriting(ABC):
    """One rank's files below ``directory``. What goes wrong is kept for ``is_written`` and ``_join``."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None

    @abstractmethod
    def _write(self) -> None:
        """All of this rank's files, flushed to disk. Needs neither the device nor another rank."""

    @abstractmethod
    def finish(self, timeout_s: float = 0.0) -> None:
        """Wait for every rank's files, then write what makes the checkpoint whole. Collective.

        Args:
            timeout_s: bound on the wait for files that are written in the background.

        Raises:
            CheckpointError: a rank could not write, or not in time; on every rank.
        """

    def write(self) -> None:
        """Write this rank's files now; a failure is kept for ``finish``, where all ranks hear of it."""
        try:
            self._write()
        except Exception as error:
            self._failure = error

    def write_in_background(self) -> None:
        """The same in a thread of its own."""
        # A thread, not a process: forking one that has threads, as Ray's actors do, may hang. It ends with the process.
        self._thread = threading.Thread(target=self.write, name=f"writing {self._directory}", daemon=True)
        self._thread.start()

    def is_written(self) -> bool:
        """Whether this rank has written all it has to. Not collective.

        Raises:
            CheckpointError: it could not.
        """
        if self._thread is not None and self._thread.is_alive():
            return False
        if self._failure is not None:
            raise self._failure
        return True

    def _join(self, timeout_s: float) -> None:
        """Wait for this rank's own files; raises what kept them from being written."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise CheckpointError(
                    f"{self._directory}: rank {dist.get_rank()} has not written its files within {timeout_s:.0f} s; "
                    "look whether the file system hangs, or raise trainer.step_timeout_s"
                )
        if self._failure is not None:
            raise self._failure
