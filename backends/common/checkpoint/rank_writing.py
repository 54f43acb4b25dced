"""A rank's part of writing a checkpoint: immediately, or in a background thread."""

import threading
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from backends.common.checkpoint.data_file import refused_by_disk
from backends.common.checkpoint.integrity import Checksums, Piece
from backends.common.process.agreement import together
from slime_like.errors import CheckpointError
from slime_like.system.json_collectives import gather_json


class RankWriting(ABC):
    """One rank's files below ``directory``. Failures are kept for ``is_written`` and ``finish``.

    Args:
        directory: created here; shared by all ranks.
        device: device of this rank's small collectives.

    Attributes:
        plain_files: names of files written next to the data files.
    """

    plain_files: ClassVar[tuple[str, ...]]

    def __init__(self, directory: Path, device: torch.device) -> None:
        self._directory = directory
        self._device = device
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None
        self._pieces: dict[str, list[Piece]] = {}
        together(self._make_directory, f"writing {directory}", device)

    def _make_directory(self) -> None:
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"could not be created ({error})",
                code="directory-refused",
                who=str(self._directory),
                remedy="choose another directory",
            ) from error

    @abstractmethod
    def _write(self) -> None:
        """Write and flush this rank's files. Needs neither the device nor another rank."""

    @abstractmethod
    def _write_index(self) -> None:
        """Write the index that readers use to find pieces, after every rank has written its files. Collective."""

    def finish(self, timeout_s: float = 0.0) -> None:
        """Wait for every rank's files, then write what completes the checkpoint. Collective.

        Args:
            timeout_s: bound on the wait for files that are written in the background.

        Raises:
            CheckpointError: a rank failed to write, or ran out of time; raised on every rank.
        """
        what = f"writing {self._directory}"
        together(lambda: self._join(timeout_s), what, self._device)
        self._write_index()
        pieces = gather_json(self._pieces, self._device)
        together(lambda: self._write_checksums(pieces), what, self._device)

    def _write_checksums(self, pieces: list[dict[str, list[list[Any]]]] | None) -> None:
        if pieces is not None:
            with refused_by_disk(self._directory):
                everyones = {name: [Piece(*one) for one in file] for part in pieces for name, file in part.items()}
                Checksums.of_directory(self._directory, everyones, self.plain_files).write()

    def write(self) -> None:
        """Write this rank's files now. A failure is kept for ``finish``, which reports it to all ranks."""
        try:
            self._write()
        except Exception as error:
            self._failure = error

    def write_all(self) -> None:
        """Write and finish. Collective."""
        self.write()
        self.finish()

    def write_in_background(self) -> None:
        """Write this rank's files in a thread."""
        # A thread, because forking a process with threads, such as a Ray actor, may hang. It ends with the process.
        self._thread = threading.Thread(target=self.write, name=f"writing {self._directory}", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """True while files are being written in the background."""
        return self._thread is not None and self._thread.is_alive()

    def is_written(self, timeout_s: float = 0.0) -> bool:
        """Return whether this rank has written all its files; raises the failure, if any. Not collective."""
        if self._thread is not None:
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                return False
        if self._failure is not None:
            raise self._failure
        return True

    def _join(self, timeout_s: float) -> None:
        if not self.is_written(timeout_s):
            raise CheckpointError(
                f"rank {dist.get_rank()} has not written its files within {timeout_s:.0f} s",
                code="save-timeout",
                who=str(self._directory),
                remedy="check whether the file system hangs, or raise trainer.step_timeout_s",
            )
