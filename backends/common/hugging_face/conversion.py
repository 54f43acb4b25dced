"""Code shared by conversions in both directions: requests and failures."""

import contextlib
import os
import shutil
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from backends.common.checkpoint.integrity import ByteRange, ChecksumStream
from backends.common.checkpoint.partial_output import FinishedFile, PartialOutput
from backends.common.checkpoint.writing import error_of_system
from backends.common.hugging_face.files import is_not_finite
from backends.common.process.agreement import list_names
from slime_like.errors import CheckpointError
from slime_like.interfaces.conversion import ConversionOptions, Report
from slime_like.system.threads import Tracker, run_jobs

Content = TypeVar("Content")


def fingerprint(directory: Path) -> list[list[Any]]:
    """Return name, size and time of every file, to detect changes in a directory."""
    files = sorted(path for path in directory.iterdir() if path.is_file())
    return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]


@contextlib.contextmanager
def translate_disk_errors(path: Path, tensors: Sequence[str] = ()) -> Iterator[None]:
    """Turn a rejected write into one sentence. torch reports it as a RuntimeError."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        if (reason := error_of_system(error)) is None:
            raise
        what = f" with {list_names(list(tensors))}" if tensors else ""
        raise CheckpointError(
            f"{path}{what} could not be written ({reason})",
            code="write-refused",
            remedy="free space and run the same command again: finished files are kept",
        ) from error


@dataclass(frozen=True, slots=True)
class FileJob(Generic[Content]):
    """One file to write, and its tensors' names and bytes."""

    name: str
    content: Content
    tensors: list[str]
    nbytes: int


@dataclass(frozen=True, slots=True)
class FileFaults:
    """Names of one file's tensors with NaN or infinity, and of tensors with values that became infinite."""

    nan: list[str] = field(default_factory=list)
    too_large: list[str] = field(default_factory=list)

    def note(self, name: str, before: Tensor, after: Tensor) -> None:
        """Compare a tensor's values before and after their cast."""
        if is_not_finite(before):
            self.nan.append(name)
        if _overflows(before, after):
            self.too_large.append(name)


@dataclass(frozen=True, slots=True)
class Conversion(ABC, Generic[Content]):
    """A conversion to disk."""

    source: Path
    partial: PartialOutput
    options: ConversionOptions

    @abstractmethod
    def _pieces(
        self, content: Content, stream: ChecksumStream, faults: FileFaults, tracker: Tracker
    ) -> Iterator[ByteRange]:
        """Read, arrange and write the content of a file."""

    def write_files(self, jobs: Sequence[FileJob[Content]], report: Report) -> tuple[dict[str, FinishedFile], int]:
        """Write all unfinished files; return all files by name, and how many were already finished.

        Raises:
            CheckpointError: the disk is too small for the missing files, or tensors have forbidden values.
        """
        files = dict(self.partial.finished)
        reused = len(files)
        left = [job for job in jobs if job.name not in files]
        total, missing = sum(job.nbytes for job in jobs), sum(job.nbytes for job in left)
        free = shutil.disk_usage(self.partial.path).free
        if free < missing:
            raise CheckpointError(
                f"{missing / 1e9:.2f} GB must be written, but its disk has only {free / 1e9:.2f} GB left",
                code="no-disk-space",
                who=str(self.partial.final),
                remedy="free space, or choose another directory",
            )

        def finished(file: FinishedFile) -> None:
            self.partial.add(file)
            files[file.name] = file

        run_jobs(left, self._write, self.options.workers, finished, lambda done: report(total - missing + done, total))
        _require_whole_values(list(files.values()), self.source, self.options)
        return files, reused

    def _write(self, job: FileJob[Content], tracker: Tracker) -> FinishedFile:
        """Write one file. It is durable when this returns."""
        faults, path = FileFaults(), self.partial.path / job.name
        with translate_disk_errors(path, job.tensors), path.open("wb") as file:
            pieces = tuple(self._pieces(job.content, ChecksumStream(file), faults, tracker))
            file.flush()
            os.fsync(file.fileno())
        return FinishedFile(job.name, pieces, tuple(faults.nan), tuple(faults.too_large))


def _overflows(before: Tensor, after: Tensor) -> bool:
    """Return whether a cast made a finite number infinite. float16 ends at 65504, bfloat16 at float32's limit."""
    if after.dtype == before.dtype or torch.finfo(after.dtype).max >= torch.finfo(before.dtype).max:
        return False
    infinite = after.isinf()
    return bool(infinite.any()) and int(infinite.sum()) > int(before.isinf().sum())


def _require_whole_values(files: Sequence[FinishedFile], source: Path, options: ConversionOptions) -> None:
    """Reject, by name, tensors that the type cannot hold, or with NaN or infinity unless allowed."""
    names = sorted({name for file in files for name in file.too_large})
    if names:
        raise CheckpointError(
            f"tensors with numbers that --dtype {options.dtype} cannot hold: {list_names(names)}",
            code="dtype-too-narrow",
            who=str(source),
            remedy="use bfloat16 or float32",
        )
    names = sorted({name for file in files for name in file.nan})
    if names and not options.allow_nan:
        raise CheckpointError(
            f"tensors with NaN or infinity in them: {list_names(names)}",
            code="weights-not-finite",
            who=str(source),
            remedy="use a checkpoint from before it went wrong, or --allow_nan to convert it unchanged",
        )


def common_dtype(dtypes: Sequence[tuple[torch.dtype, int]]) -> torch.dtype:
    """Return the type of the most bytes."""
    totals: Counter[torch.dtype] = Counter()
    for dtype, nbytes in dtypes:
        totals[dtype] += nbytes
    return totals.most_common(1)[0][0]
