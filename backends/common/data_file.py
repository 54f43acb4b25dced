"""One data file of a distributed checkpoint in torch's format, with the checksum of every piece in it."""

from __future__ import annotations

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

from backends.common.integrity import ChecksumStream, Piece
from slime_like.errors import CheckpointError


def write_data_file(path: Path, key: str, entries: Sequence[tuple[Any, Any]]) -> tuple[list[Piece], list[WriteResult]]:
    """Write tensors and serialised objects one behind the other, flushed to disk.

    Args:
        path: the file.
        key: its name in the checkpoint's index.
        entries: torch's write items, each with its tensor or its ``BytesIO``.

    Raises:
        OSError: the disk refused.
    """
    pieces: list[Piece] = []
    results = []
    with path.open("wb") as file:
        stream = ChecksumStream(file)
        for item, data in entries:
            if isinstance(data, Tensor):
                _save_tensor(data, stream)
            else:
                stream.write(data.getbuffer())
            piece = stream.piece(_name(item.index))
            pieces.append(piece)
            place = _StorageInfo(key, piece.offset, piece.length)
            results.append(WriteResult(item.index, piece.length, place))
        file.flush()
        os.fsync(file.fileno())
    return pieces, results


@contextlib.contextmanager
def refused_by_disk(path: Path) -> Iterator[None]:
    """One sentence about a disk that refuses."""
    try:
        yield
    except (CheckpointException, OSError) as error:
        raise CheckpointError(f"{path}: could not be written ({error}); free space there") from error


def _save_tensor(tensor: Tensor, stream: ChecksumStream) -> None:
    try:
        torch_save(tensor.to("cpu"), stream)  # type: ignore[arg-type]  # it calls write and flush alone
    except RuntimeError as error:  # torch's own words for a disk that refused
        raise OSError(str(error)) from error


def _name(index: MetadataIndex) -> str:
    return index.fqn if index.offset is None else f"{index.fqn} from {list(index.offset)} on"
