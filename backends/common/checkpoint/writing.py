"""Writing of a training checkpoint in torch's format: every rank's data file, then the index and the checksums.

A rank writes the parts of tensors that it holds, immediately or in a background thread. Rank 0 completes the result.
"""

import contextlib
import io
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from backends.common.checkpoint.integrity import ByteRange, Checksums, ChecksumStream
from backends.common.process.agreement import list_names, together
from slime_like.errors import CheckpointError
from slime_like.system.disk import refusal
from slime_like.system.heartbeat import beat
from slime_like.system.json_collectives import gather_json

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor on disk, and its values.

    Attributes:
        name: name of the tensor.
        data: memory of the box, with the box's shape.
        shape, offset: shape of the whole tensor, and the box's place in it.
        is_padded: the number of rows depends on the layout that wrote the tensor.
    """

    name: str
    data: Tensor
    shape: Shape
    offset: Shape
    is_padded: bool = False


class Box(NamedTuple):
    """Description of a ``Part``, or of an object, which has only a name. Consists of JSON values."""

    name: str
    dtype: str = ""
    shape: Sequence[int] = ()
    offset: Sequence[int] = ()
    size: Sequence[int] = ()

    @classmethod
    def of(cls, part: Part) -> "Box":
        dtype = str(part.data.dtype).removeprefix("torch.")
        return cls(part.name, dtype, part.shape, part.offset, tuple(part.data.shape))


@contextlib.contextmanager
def translate_disk_errors(path: Path, tensors: Sequence[str] = ()) -> Iterator[None]:
    """Turn a rejected write into one sentence, which names ``tensors``. torch reports it as a RuntimeError."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        if (cause := _error_of_system(error)) is None:
            raise
        what = f" with {list_names(list(tensors))}" if tensors else ""
        raise CheckpointError(refusal(path, cause.strerror or str(cause), what), code="write-refused") from error


def _error_of_system(error: BaseException | None) -> OSError | None:
    """Return the system's error: the error itself, or one that it hides."""
    while error is not None and not isinstance(error, OSError):
        error = error.__context__
    return error


def write_data_file(path: Path, parts: Sequence[Part], objects: Mapping[str, bytes]) -> list[ByteRange]:
    """Write serialized objects by name, then parts, flushed to disk. Raises OSError if the disk rejects the write."""
    with path.open("wb") as file:
        stream, pieces = ChecksumStream(file), []
        for name, content in objects.items():
            stream.write(content)
            pieces.append(stream.piece(name))
        pieces += [write_part(stream, part) for part in parts]
        file.flush()
        os.fsync(file.fileno())
    return pieces


def write_part(stream: ChecksumStream, part: Part) -> ByteRange:
    """Write one part in the form that the readers of torch and Megatron expect."""
    beat()
    data = part.data.detach().to("cpu").contiguous()
    if data.untyped_storage().nbytes() != data.nbytes:
        data = data.clone()  # torch would save the whole storage of a view
    torch.save(data, cast(BinaryIO, stream))
    return stream.piece(f"{part.name} from {list(part.offset)} on")


def to_bytes(value: Any) -> bytes:
    """Serialize a value in torch's format."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def write_index(
    directory: Path, files: Iterable[tuple[str, Sequence[Box], Sequence[ByteRange]]], plain: Mapping[str, bytes]
) -> None:
    """Complete a checkpoint: write plain files, torch's index, and the checksums.

    Args:
        files: name of every data file, with the boxes in it and their bytes.
        plain: contents of further files by name.

    Raises:
        OSError: the disk rejected the write.
        CheckpointError: an element of a tensor is in no file, or in two.
    """
    index: dict[str, Any] = {}
    results: list[WriteResult] = []
    written: dict[str, Sequence[ByteRange]] = {}
    for name, boxes, pieces in files:
        written[name] = pieces
        for box, piece in zip(boxes, pieces, strict=True):
            place = _StorageInfo(name, piece.offset, piece.length)
            results.append(WriteResult(_describe(index, box), piece.length, place))
    _require_whole(directory, index, results)
    for name, content in plain.items():
        (directory / name).write_bytes(content)
    FileSystemWriter(directory).finish(Metadata(index), [results])
    Checksums.of_directory(directory, written, (*plain, ".metadata")).write()


def _describe(index: dict[str, Any], box: Box) -> MetadataIndex:
    """Add a box to torch's index and return its key."""
    if not box.dtype:
        index[box.name] = BytesStorageMetadata()
        return MetadataIndex(box.name)
    properties, offset = TensorProperties(dtype=getattr(torch, box.dtype)), torch.Size(box.offset)
    tensor = index.setdefault(box.name, TensorStorageMetadata(properties, torch.Size(box.shape), []))
    tensor.chunks.append(ChunkStorageMetadata(offset, torch.Size(box.size)))
    return MetadataIndex(box.name, offset, len(tensor.chunks) - 1)


def _require_whole(directory: Path, index: Mapping[str, Any], results: Sequence[WriteResult]) -> None:
    tensors = {name: each for name, each in index.items() if isinstance(each, TensorStorageMetadata)}
    wrong = [
        name
        for name, tensor in tensors.items()
        if sum(math.prod(chunk.sizes) for chunk in tensor.chunks) != math.prod(tensor.size)
    ]
    if wrong or len({result.index for result in results}) < len(results):
        raise CheckpointError(
            f"tensors that no rank wrote whole, or two ranks wrote: {list_names(wrong)}",
            code="tensors-not-written",
            who=str(directory),
        )


class CheckpointWriter:
    """One rank's part of writing a checkpoint. Failures are kept for ``is_written`` and ``finish``.

    Args:
        directory: created here; shared by all ranks.
        parts: what this rank writes. All ranks' parts together are every tensor, once.
        objects: serialized values that this rank writes, by name.
        plain: contents of further files by name, the same on every rank.
        device: device of this rank's small collectives.
        copy: copies every part's data immediately, so that the state may change before it is written.
    """

    def __init__(
        self,
        directory: Path,
        parts: Sequence[Part],
        objects: Mapping[str, bytes],
        plain: Mapping[str, bytes],
        device: torch.device,
        copy: Callable[[Iterable[Tensor]], list[Tensor]] | None = None,
    ) -> None:
        self._directory, self._plain, self._device = directory, plain, device
        self._file = directory / f"__{dist.get_rank()}_0.distcp"
        self._failure: Exception | None = None
        self._thread: threading.Thread | None = None
        self._pieces: list[ByteRange] = []
        together(self._make_directory, f"writing {directory}", device)
        self._objects, self._boxes = objects, [*map(Box, objects), *map(Box.of, parts)]
        if copy is not None:
            copied = copy(part.data for part in parts)
            parts = [replace(part, data=data) for part, data in zip(parts, copied, strict=True)]
        self._parts = parts

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

    def write(self) -> None:
        """Write this rank's file now. A failure is kept for ``finish``, which reports it to all ranks.

        Needs neither the device, if the state was copied, nor another rank.
        """
        try:
            if self._boxes:
                with translate_disk_errors(self._file):
                    self._pieces = write_data_file(self._file, self._parts, self._objects)
        except Exception as error:
            self._failure = error
        self._parts = ()

    def finish(self, timeout_s: float = 0.0) -> None:
        """Wait for every rank's file, then write what completes the checkpoint. Collective.

        Args:
            timeout_s: bound on the wait for a file that is written in the background.

        Raises:
            CheckpointError: a rank failed to write, or ran out of time; raised on every rank.
        """
        what = f"writing {self._directory}"
        together(lambda: self._join(timeout_s), what, self._device)
        written = gather_json([self._file.name, self._boxes, self._pieces], self._device)
        together(lambda: self._complete(written), what, self._device)

    def _complete(self, written: list[list[Any]] | None) -> None:
        if written is not None:
            files = [
                (name, [Box(*box) for box in boxes], [ByteRange(*piece) for piece in pieces])
                for name, boxes, pieces in written
                if boxes
            ]
            with translate_disk_errors(self._directory):
                write_index(self._directory, files, self._plain)

    def write_all(self) -> None:
        """Write and finish. Collective."""
        self.write()
        self.finish()

    def write_in_background(self) -> None:
        """Write this rank's file in a thread."""
        # A thread, because forking a process with threads, such as a Ray actor, may hang. It ends with the process.
        self._thread = threading.Thread(target=self.write, name=f"writing {self._directory}", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """True while the file is being written in the background."""
        return self._thread is not None and self._thread.is_alive()

    def is_written(self, timeout_s: float = 0.0) -> bool:
        """Return whether this rank has written its file; raises the failure, if any. Not collective."""
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
