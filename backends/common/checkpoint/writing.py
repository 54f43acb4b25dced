"""A rank's part of writing a checkpoint: data files with checksums, written immediately or in a background thread."""

import contextlib
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch import save as torch_save
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from backends.common.checkpoint.integrity import ByteRange, Checksums, ChecksumStream
from backends.common.process.agreement import together
from slime_like.errors import CheckpointError
from slime_like.system.disk import refusal
from slime_like.system.json_collectives import gather_json


def write_data_file(
    path: Path, key: str, entries: Sequence[tuple[Any, Any]]
) -> tuple[list[ByteRange], list[WriteResult]]:
    """Write tensors and serialized objects one after the other, flushed to disk.

    Args:
        key: the file's name in the checkpoint's index.
        entries: torch's write items, each with its tensor or its ``BytesIO``.

    Raises:
        OSError: the disk rejected the write.
    """
    pieces: list[ByteRange] = []
    results = []
    with path.open("wb") as file:
        stream = ChecksumStream(file)
        for item, data in entries:
            if isinstance(data, Tensor):
                save_to_stream(data.to("cpu"), stream)
            else:
                with data.getbuffer() as view:  # Python 3.12.1 crashes when it collects a view held by a traceback
                    stream.write(view)
            piece = stream.piece(_name(item.index))
            pieces.append(piece)
            place = _StorageInfo(key, piece.offset, piece.length)
            results.append(WriteResult(item.index, piece.length, place))
        file.flush()
        os.fsync(file.fileno())
    return pieces, results


@contextlib.contextmanager
def translate_disk_errors(path: Path, *others: type[Exception]) -> Iterator[None]:
    """Turn a failed write into one sentence with the system's reason, which torch hides, as may ``others``."""
    failures: tuple[type[BaseException], ...] = (CheckpointException, OSError, *others)
    try:
        yield
    except failures as error:
        cause = error_of_system(error)
        reason = str(error) if cause is None else cause.strerror or str(cause)
        raise CheckpointError(refusal(path, reason), code="write-refused") from error


def save_to_stream(value: Any, stream: Any) -> None:
    """Save in torch's format through anything with ``write`` and ``flush``.

    Raises:
        OSError: the disk rejected the write. (Given a path, torch would hide the system's message.)
    """
    try:
        torch_save(value, stream)
    except RuntimeError as error:  # torch's message hides the system's
        cause = error_of_system(error)
        if cause is None:
            raise
        raise cause from error


def error_of_system(error: BaseException) -> OSError | None:
    """Return the system's error: the error itself, or one that it hides."""
    if isinstance(error, OSError):
        return error
    behind = [failure for failure, _ in error.failures.values()] if isinstance(error, CheckpointException) else []
    if error.__context__ is not None:
        behind.append(error.__context__)
    return next((cause for failure in behind if (cause := error_of_system(failure)) is not None), None)


def _name(index: MetadataIndex) -> str:
    return index.fqn if index.offset is None else f"{index.fqn} from {list(index.offset)} on"


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
        self._pieces: dict[str, list[ByteRange]] = {}
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
            with translate_disk_errors(self._directory):
                everyones = {name: [ByteRange(*one) for one in file] for part in pieces for name, file in part.items()}
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
