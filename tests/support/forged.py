"""Checkpoints that are programs: forged files, whose checksums are right."""

import io
import pickle
import shutil
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from backends.common.checkpoint.integrity import ByteRange, Checksums


class Program:
    """Creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self._file,)


def torchs_index(directory: Path) -> Metadata:
    return FileSystemReader(directory).read_metadata()


def pieces_of(directory: Path) -> dict[str, list[ByteRange]]:
    """Return what the index lists in files, with the checksums of what is there."""
    pieces: dict[str, list[ByteRange]] = {}
    for index, info in torchs_index(directory).storage_data.items():
        if not (directory / info.relative_path).is_file():  # removed, or a pipe, whose reader would wait
            continue
        content = (directory / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
        piece = ByteRange(index.fqn, info.offset, info.length, zlib.crc32(content))
        pieces.setdefault(info.relative_path, []).append(piece)
    return pieces


def forge_object(directory: Path, name: str, program: Program) -> None:
    """Turn a stored object or tensor into a program, which the index calls an object."""
    index, content = torchs_index(directory), io.BytesIO()
    torch.save(program, content)
    place = next(entry for entry in index.storage_data if entry.fqn == name)
    info = index.storage_data[place]
    file = directory / info.relative_path
    info.offset, info.length = file.stat().st_size, len(content.getvalue())
    file.write_bytes(file.read_bytes() + content.getvalue())
    index.state_dict_metadata[name] = BytesStorageMetadata()
    index.storage_data = {(type(key)(name) if key is place else key): kept for key, kept in index.storage_data.items()}
    (directory / ".metadata").write_bytes(pickle.dumps(index))


def forged_copies(whole: Path, root: Path, plain: Sequence[str], stored: Sequence[str], executed: Path) -> list[Path]:
    """A copy for each of the plain files and stored names that is a program in it."""
    copies = []
    for name in (*plain, *stored):
        copy = shutil.copytree(whole, root / f"forged-{len(copies)}" / "trainer")
        pieces = pieces_of(whole)
        if name in stored:
            forge_object(copy, name, Program(executed))
            pieces = pieces_of(copy)
        elif name == ".metadata":
            (copy / name).write_bytes(pickle.dumps(Program(executed)))
        else:
            torch.save(Program(executed), copy / name)
        files = [file.name for file in copy.iterdir() if file.suffix != ".distcp" and file.name != "checksums.json"]
        Checksums.of_directory(copy, pieces, files).write()
        copies.append(copy)
    return copies
