"""Code shared by conversions in both directions: hidden output, files and failures."""

import contextlib
import fcntl
import os
import shutil
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor

from backends.common.checkpoint.integrity import ByteRange, ChecksumStream
from backends.common.checkpoint.writing import translate_disk_errors
from backends.common.hugging_face.files import is_not_finite
from backends.common.process.agreement import list_names
from slime_like.errors import CheckpointError
from slime_like.interfaces.conversion import ConversionOptions, Report
from slime_like.system.disk import replace_directory, sync_tree
from slime_like.system.threads import Tracker, run_jobs

Content = TypeVar("Content")


@contextlib.contextmanager
def hidden_output(final: Path) -> Iterator[Path]:
    """Yield an empty directory next to ``final``, which becomes ``final`` by one rename, replacing what was there.

    After an error or an interruption, nothing is left.

    Raises:
        CheckpointError: the disk rejects a write, or another process is writing the same output.
    """
    hidden = final.parent / f".{final.name}.partial"
    with contextlib.ExitStack() as stack, translate_disk_errors(hidden):
        hidden.mkdir(parents=True, exist_ok=True)
        lock = os.open(hidden, os.O_RDONLY)
        stack.callback(os.close, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(
                "another process is writing it", code="output-in-use", who=str(final), remedy="wait for it, or end it"
            ) from error
        for path in hidden.iterdir():  # of a process that was killed
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        try:
            yield hidden
            sync_tree(hidden)
            replace_directory(hidden, final)
        except BaseException:
            shutil.rmtree(hidden, ignore_errors=True)
            raise


@dataclass(frozen=True, slots=True)
class FileJob(Generic[Content]):
    """One file to write, and its tensors' names and bytes."""

    name: str
    content: Content
    tensors: list[str]
    nbytes: int


@dataclass(frozen=True, slots=True)
class FileFaults:
    """Names of tensors with NaN or infinity, and of tensors with values that became infinite. Threads may add to it."""

    nan: set[str] = field(default_factory=set)
    too_large: set[str] = field(default_factory=set)

    def note(self, name: str, before: Tensor, after: Tensor) -> None:
        """Compare a tensor's values before and after their cast."""
        if is_not_finite(before):
            self.nan.add(name)
        if _overflows(before, after):
            self.too_large.add(name)

    def require_none(self, source: Path, options: ConversionOptions) -> None:
        """Reject, by name, tensors that the type cannot hold, or with NaN or infinity unless allowed."""
        if self.too_large:
            raise CheckpointError(
                f"tensors with numbers that --dtype {options.dtype} cannot hold: {list_names(sorted(self.too_large))}",
                code="dtype-too-narrow",
                who=str(source),
                remedy="use bfloat16 or float32",
            )
        if self.nan and not options.allow_nan:
            raise CheckpointError(
                f"tensors with NaN or infinity in them: {list_names(sorted(self.nan))}",
                code="weights-not-finite",
                who=str(source),
                remedy="use a checkpoint from before it went wrong, or --allow_nan to convert it unchanged",
            )


@dataclass(frozen=True, slots=True)
class Conversion(ABC, Generic[Content]):
    """A conversion to files of the directory ``output``."""

    source: Path
    output: Path
    options: ConversionOptions
    faults: FileFaults = field(default_factory=FileFaults)

    @abstractmethod
    def _pieces(self, content: Content, stream: ChecksumStream, tracker: Tracker) -> Iterator[ByteRange]:
        """Read, arrange and write the content of a file. Note ``faults``."""

    def write_files(self, jobs: Sequence[FileJob[Content]], report: Report) -> dict[str, list[ByteRange]]:
        """Write all files; return the pieces in each by its name.

        Raises:
            CheckpointError: the disk is too small, or tensors have forbidden values.
        """
        total, free = sum(job.nbytes for job in jobs), shutil.disk_usage(self.output).free
        if free < total:
            raise CheckpointError(
                f"{total / 1e9:.2f} GB must be written, but its disk has only {free / 1e9:.2f} GB left",
                code="no-disk-space",
                who=str(self.output),
                remedy="free space, or choose another directory",
            )
        files: dict[str, list[ByteRange]] = {}
        run_jobs(jobs, self._write, self.options.workers, files.update, lambda done: report(done, total))
        self.faults.require_none(self.source, self.options)
        return files

    def _write(self, job: FileJob[Content], tracker: Tracker) -> dict[str, list[ByteRange]]:
        """Write one file. It is durable when this returns."""
        path = self.output / job.name
        with translate_disk_errors(path, job.tensors), path.open("wb") as file:
            pieces = list(self._pieces(job.content, ChecksumStream(file), tracker))
            file.flush()
            os.fsync(file.fileno())
        return {job.name: pieces}


def _overflows(before: Tensor, after: Tensor) -> bool:
    """Return whether a cast made a finite number infinite. float16 ends at 65504, bfloat16 at float32's limit."""
    if after.dtype == before.dtype or torch.finfo(after.dtype).max >= torch.finfo(before.dtype).max:
        return False
    infinite = after.isinf()
    return bool(infinite.any()) and int(infinite.sum()) > int(before.isinf().sum())


def common_dtype(dtypes: Sequence[tuple[torch.dtype, int]]) -> torch.dtype:
    """Return the type of the most bytes."""
    totals: Counter[torch.dtype] = Counter()
    for dtype, nbytes in dtypes:
        totals[dtype] += nbytes
    return totals.most_common(1)[0][0]
