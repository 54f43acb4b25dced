"""Checksums of a training checkpoint: one for each piece in its data files, and one for each small file.

torch stores a CRC-32 with every tensor but never compares it on loading, so a flipped byte becomes a wrong weight.
Here, one more file stores the CRC-32 (ISO 3309, as in zlib) of the written bytes. A rank compares every piece before it
loads it, under any layout, and before anything is unpickled. A CRC finds damage and mix-ups, but not forgery;
``stored.py`` prevents forged content from being executed.
"""

import json
import zlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Self

from backends.common.process.agreement import list_names
from slime_like.errors import CheckpointError
from slime_like.models.converted import damage_remedy, whole_file
from slime_like.system.disk import length_fault

CHECKSUMS_FILE = "checksums.json"
"""Written last: a checkpoint without it is incomplete."""

_SHOWN = 2
"""Number of tensors that a message names; it also names the directory and the file."""


class ByteRange(NamedTuple):
    """One stored tensor, part of a tensor, or object: ``length`` bytes of a data file, starting at ``offset``."""

    name: str
    offset: int
    length: int
    crc32: int


class ChecksumStream:
    """A binary file opened for writing that also computes checksums. torch saves to it like to any stream."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._crc32 = 0
        self._start = file.tell()

    def write(self, data: Any) -> int:
        self._crc32 = zlib.crc32(data, self._crc32)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def piece(self, name: str) -> ByteRange:
        """End a piece: everything written since the previous one."""
        end = self._file.tell()
        piece = ByteRange(name, self._start, end - self._start, self._crc32)
        self._start, self._crc32 = end, 0
        return piece


class Checksums:
    """Checksums of one checkpoint directory: pieces by data file, length and CRC-32 of the other files."""

    def __init__(
        self, directory: Path, pieces: Mapping[str, Sequence[ByteRange]], files: Mapping[str, list[int]]
    ) -> None:
        self._directory = directory
        self._files = dict(files)
        self._pieces = {(file, piece.offset): piece for file, entries in pieces.items() for piece in entries}
        self._lengths = {
            file: max((piece.offset + piece.length for piece in entries), default=0) for file, entries in pieces.items()
        }

    @classmethod
    def of_directory(
        cls, directory: Path, pieces: Mapping[str, Sequence[ByteRange]], plain_files: Sequence[str]
    ) -> Self:
        """Create it for a directory; reads the plain files next to the data files and computes their checksums."""
        return cls(directory, pieces, {name: whole_file(directory / name) for name in plain_files})

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Read what ``write`` wrote.

        Raises:
            CheckpointError: the checkpoint is incomplete, or the checksums themselves are damaged.
        """
        path = directory / CHECKSUMS_FILE
        if not path.is_file():  # reading a pipe would never end
            raise not_whole(directory, f"{CHECKSUMS_FILE} is missing")
        try:
            text = path.read_bytes()
            if not text:
                raise damage_error(directory, f"{CHECKSUMS_FILE} is empty")
            outer = json.loads(text)
            content = outer["content"]
            if outer["crc32"] != zlib.crc32(_text(content)):
                raise ValueError("the checksum of the list differs")
            pieces = {file: [ByteRange(*entry) for entry in entries] for file, entries in content["pieces"].items()}
            if not all(map(is_file_name, pieces)):
                raise ValueError("a name is not a file name")
            return cls(directory, pieces, content["files"])
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise damage_error(directory, f"{CHECKSUMS_FILE} cannot be read: {type(error).__name__}") from error

    def write(self) -> None:
        """Complete the checkpoint. Raises OSError if the disk rejects the write."""
        pieces: dict[str, list[ByteRange]] = {}
        for (file, _), piece in self._pieces.items():
            pieces.setdefault(file, []).append(piece)
        content = {"pieces": pieces, "files": self._files}
        whole = {"crc32": zlib.crc32(_text(content)), "content": content}
        (self._directory / CHECKSUMS_FILE).write_bytes(_text(whole))

    def verify_plain_files(self, names: Sequence[str]) -> None:
        """Reject missing or changed files among those that are read as a whole."""
        for name in names:
            try:
                found = whole_file(self._directory / name)
            except FileNotFoundError as error:
                if name not in self._files:
                    raise CheckpointError(
                        f"was written by another trainer.backend, whose checkpoints have no {name}",
                        code="checkpoint-of-another-backend",
                        who=str(self._directory),
                        remedy="use the backend that wrote it, or the Hugging Face model that its run exported",
                    ) from error
                raise not_whole(self._directory, f"{name} is missing") from error
            except OSError as error:
                raise damage_error(self._directory, f"{name} cannot be read: {error.strerror}") from error
            written = self._files.get(name)
            if found != written:
                fault = None if written is None else length_fault(found[0], written[0])
                raise damage_error(self._directory, f"{name} {fault or 'is not as it was written'}")

    def verify_lengths(self) -> None:
        """Reject data files that are missing, cut off or longer than written, even if the affected part is not read."""
        self.require_files(self._lengths)
        for name in sorted(self._lengths):
            found = (self._directory / name).stat().st_size
            if (fault := length_fault(found, self._lengths[name])) is not None:
                raise damage_error(self._directory, f"{name} {fault}{self._lost(name, found)}")

    def require_files(self, names: Collection[str]) -> None:
        """Reject names that have no checksums or are not files in the directory."""
        known = (name for name in names if name in self._lengths and (self._directory / name).is_file())
        if missing := sorted({*names} - {*known}):
            raise damage_error(self._directory, f"files that its index lists are missing: {list_names(missing)}")

    def _lost(self, name: str, found: int) -> str:
        """Name the tensors that the first ``found`` bytes of a data file lack. A tensor may span several pieces, whose
        names contain their start."""
        lost = dict.fromkeys(
            piece.name.partition(" from [")[0]
            for (file, offset), piece in sorted(self._pieces.items())
            if file == name and offset + piece.length > found
        )
        return f", and lacks {list_names(list(lost), _SHOWN)}" if lost else ""

    def verify_bytes(self, content: bytes, name: str, offset: int) -> None:
        """Reject bytes read at ``offset`` of the data file ``name`` if they differ from what was written."""
        piece = self._pieces.get((name, offset))
        if piece is None:
            raise damage_error(self._directory, f"{name} has no piece at byte {offset}")
        if piece.length != len(content) or zlib.crc32(content) != piece.crc32:
            place = f"{name}: bytes {offset} to {offset + piece.length}, {piece.name}"
            raise damage_error(self._directory, f"{place}, are not as written")


def damage_error(directory: Path, reason: str) -> CheckpointError:
    """Return the error for a damaged checkpoint, with the remedy for a run's or a converted one."""
    remedy = damage_remedy(directory, f"resume from a checkpoint before {directory.parent.name}")  # step-N/trainer
    return CheckpointError(f"is damaged ({reason})", code="checkpoint-damaged", who=str(directory), remedy=remedy)


def not_whole(directory: Path, reason: str) -> CheckpointError:
    """Return the error for a directory that is not a checkpoint, or lacks the file that is written last."""
    return CheckpointError(
        f"not a whole training checkpoint ({reason})",
        code="checkpoint-not-whole",
        who=str(directory),
        remedy=damage_remedy(directory, "use another one"),
    )


def is_file_name(name: Any) -> bool:
    """Return whether it names a file in a directory, and nothing outside."""
    return isinstance(name, str) and 0 < len(name) < 256 and name not in (".", "..") and not {"/", "\0"} & {*name}


def _text(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
