"""One data file of a distributed checkpoint in torch's format, with a checksum for each piece."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from torch import save as torch_save
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult

from backends.common.checkpoint.integrity import ChecksumStream, Piece
from slime_like.errors import CheckpointError
from slime_like.system.disk import refusal


def write_data_file(path: Path, key: str, entries: Sequence[tuple[Any, Any]]) -> tuple[list[Piece], list[WriteResult]]:
    """Write tensors and serialized objects one after the other, flushed to disk.

    Args:
        key: the file's name in the checkpoint's index.
        entries: torch's write items, each with its tensor or its ``BytesIO``.

    Raises:
        OSError: the disk rejected the write.
    """
    pieces: list[Piece] = []
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
def refused_by_disk(path: Path, *others: type[Exception]) -> Iterator[None]:
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
