"""Change files: bytes, JSON values, fields of torch's index. All choices come from the generator."""

import json
import os
import pickle
import random
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from backends.common.checkpoint.integrity import CHECKSUMS_FILE, Checksums, Piece
from backends.common.checkpoint.unpickling import is_file_name
from tests.support.forged import Program, torchs_index

VALUES: list[str] = [
    "null", "true", "3", "-1", "0", "5e-324", "1e308", "-1e308", "1e999", "NaN", "-Infinity", "1" * 400, "1" * 5000,
    '"text"', '""', "[]", "{}", "[1, [2]]", '{"a": 1}', "[" * 100_000, '{"a":' * 5_000, "[" * 600 + "]" * 600,
    '"\\ud800"', '"' + "x" * 10_000 + '"',
]  # fmt: skip
_MARK = "\x00value"
_SIZES = (-1, 0, 1, 3, 2**31, 2**62, 2**70)
_PATHS = ("", ".", "..", "/etc/passwd", "../state.json", ".metadata", "a\x00b", "x" * 5000, "__0_0.distcp")


def damaged_bytes(content: bytes, draw: random.Random) -> bytes:
    """Cut off, overwritten in the middle, or replaced by a few bytes."""
    at, some = draw.randrange(len(content) + 1), draw.randbytes(draw.randrange(1, 9))
    return draw.choice([content[:at], content[:at] + some + content[at + len(some) :], some])


def damage(path: Path, draw: random.Random) -> None:
    """Remove the file, or change its bytes, its length or its type."""
    if path.is_symlink() or not path.is_file():  # damaged before
        return
    kind, content = draw.randrange(10), path.read_bytes()
    path.unlink()
    if kind == 0:
        return
    if kind == 1:
        path.mkdir()
    elif kind == 2:
        os.mkfifo(path)
    elif kind == 3:
        path.symlink_to(draw.choice([path, Path("/nowhere"), path.parent]))
    elif kind == 4:
        path.write_bytes(content + draw.choice([b"\0" * 5000, content, b"{}"]))
    else:
        path.write_bytes(damaged_bytes(content, draw))


def any_file(directory: Path, draw: random.Random) -> Path:
    return draw.choice(sorted(path for path in directory.rglob("*") if path.is_file() and not path.is_symlink()))


def forge_json(path: Path, draw: random.Random) -> None:
    """Replace one value, at any depth, or add one under a new name."""
    try:
        document = json.loads(path.read_text())
        text = json.dumps(with_mark(document, draw))
    except (ValueError, RecursionError):  # forged before
        text = json.dumps(_MARK)
    path.write_text(text.replace(json.dumps(_MARK), draw.choice(VALUES)))


def with_mark(value: Any, draw: random.Random) -> Any:
    """Return the document with a mark instead of one of its values."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        name = draw.choice([*value, "new"])
        return {**value, name: with_mark(value.get(name), draw)}
    if isinstance(value, list) and value and draw.random() < 0.9:
        at = draw.randrange(len(value))
        return [*value[:at], with_mark(value[at], draw), *value[at + 1 :]]
    return _MARK


def forge_index(directory: Path, draw: random.Random) -> None:
    """Change one field of torch's index, or replace it by a program."""
    index = torchs_index(directory)
    if draw.random() < 0.1:
        index.planner_data = Program(directory / "executed")
    else:
        draw.choice([_forge_place, _forge_shape, _forge_entry])(index, draw)
    (directory / ".metadata").write_bytes(pickle.dumps(index))


def _forge_place(index: Metadata, draw: random.Random) -> None:
    info = index.storage_data[draw.choice(list(index.storage_data))]
    setattr(info, *draw.choice([
        ("offset", draw.choice([*_SIZES, "0", None])),
        ("length", draw.choice([*_SIZES, "0", None])),
        ("relative_path", draw.choice([*_PATHS, 3, None])),
        ("transform_descriptors", draw.choice([[], ["zstd"], 3])),
    ]))  # fmt: skip


def _forge_shape(index: Metadata, draw: random.Random) -> None:
    names = [name for name, entry in index.state_dict_metadata.items() if isinstance(entry, TensorStorageMetadata)]
    entry = index.state_dict_metadata[draw.choice(names)]
    assert isinstance(entry, TensorStorageMetadata)
    chunk = draw.choice(entry.chunks)
    sizes = torch.Size(draw.choice([0, 1, 3, 2**31, 2**62]) for _ in range(draw.randrange(4)))
    field = draw.randrange(5)
    if field == 0:
        entry.size = sizes
    elif field == 1:
        chunk.sizes = sizes
    elif field == 2:
        chunk.offsets = sizes
    elif field == 3:
        entry.properties.dtype = draw.choice([torch.int8, torch.complex128, torch.bool, torch.float8_e4m3fn])
    else:
        entry.chunks = draw.choice([[], entry.chunks * 2, [3], None])  # type: ignore[list-item]


def _forge_entry(index: Metadata, draw: random.Random) -> None:
    for entries in draw.sample([index.state_dict_metadata, index.storage_data], draw.randrange(1, 3)):
        key = draw.choice(list(entries))
        value = entries.pop(key)
        if draw.random() < 0.5:
            entries[draw.choice(["new", "model.new", 3, key])] = draw.choice([value, None, 3])


def reseal(directory: Path, plain: Sequence[str]) -> None:
    """Give a trainer's directory checksums of the files that it has."""
    pieces: dict[str, list[Piece]] = {}
    if not (directory / ".metadata").is_file():  # removed, or a pipe
        return
    try:
        places = list(torchs_index(directory).storage_data.items())
    except Exception:  # forged: torch's reader raises whatever it meets
        places = []
    for key, info in places:
        name, offset, length = (getattr(info, field, None) for field in ("relative_path", "offset", "length"))
        if not isinstance(name, str) or not isinstance(offset, int) or not isinstance(length, int):
            continue
        if not is_file_name(name) or not (directory / name).is_file():
            continue
        content = (directory / name).read_bytes()[offset : offset + length]
        piece = Piece(str(getattr(key, "fqn", key)), offset, length, zlib.crc32(content))
        pieces.setdefault(name, []).append(piece)
    sealed = directory / CHECKSUMS_FILE
    if not sealed.is_symlink() and (sealed.is_file() or not sealed.exists()):
        Checksums.of_directory(directory, pieces, [name for name in plain if (directory / name).is_file()]).write()
