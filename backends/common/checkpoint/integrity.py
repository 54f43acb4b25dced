"""Checksums of a training checkpoint: of every piece in its data files, and of the small files beside them.

torch stores a CRC-32 with every tensor and compares none when it loads, so that a flipped byte becomes a weight. Here
the CRC-32 (ISO 3309, zlib's) of the bytes as they are written goes into one more file, and every piece that a rank is
about to load is compared first: under any layout, before anything is unpickled. A CRC finds damage and mix-ups, not
forgery; ``unpickling.py`` keeps what is forged from being executed.
"""

import json
import os
import zlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple, Self

from torch.distributed.checkpoint import FileSystemReader, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.futures import Future

from backends.common.checkpoint.unpickling import DataPlanner, is_file_name, read_index
from backends.common.process.agreement import listed
from slime_like.errors import CheckpointError
from slime_like.models.converted import damage_remedy, whole_file
from slime_like.system.disk import length_fault

CHECKSUMS_FILE = "checksums.json"
"""Written last: a checkpoint without it is not whole."""

_READ_BYTES = 4 << 20
_SHOWN = 2
"""Tensors that a sentence names; the directory and the file stand in it, too."""


class Piece(NamedTuple):
    """One stored tensor, part of a tensor, or object: ``length`` bytes from ``offset`` of a data file on."""

    name: str
    offset: int
    length: int
    crc32: int

    def is_in(self, file: IO[bytes]) -> bool:
        """Return whether its place in an open file holds these bytes; read in bounded memory."""
        file.seek(self.offset)
        crc32, left = 0, self.length
        while left and (block := file.read(min(left, _READ_BYTES))):
            crc32, left = zlib.crc32(block, crc32), left - len(block)
        return not left and crc32 == self.crc32


class ChecksumStream:
    """A binary file opened for writing that also sums up what passes: torch saves to it as to any stream."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._crc32 = 0
        self._start = file.tell()

    def write(self, data: Any) -> int:
        self._crc32 = zlib.crc32(data, self._crc32)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def piece(self, name: str) -> Piece:
        """End a piece: what was written since the last one."""
        end = self._file.tell()
        piece = Piece(name, self._start, end - self._start, self._crc32)
        self._start, self._crc32 = end, 0
        return piece


class Checksums:
    """The checksums of one checkpoint directory: pieces by data file, length and CRC-32 of the other files."""

    def __init__(self, directory: Path, pieces: Mapping[str, Sequence[Piece]], files: Mapping[str, list[int]]) -> None:
        self._directory = directory
        self._files = dict(files)
        self._pieces = {(file, piece.offset): piece for file, entries in pieces.items() for piece in entries}
        self._lengths = {
            file: max((piece.offset + piece.length for piece in entries), default=0) for file, entries in pieces.items()
        }

    @classmethod
    def of_directory(cls, directory: Path, pieces: Mapping[str, Sequence[Piece]], plain_files: Sequence[str]) -> Self:
        """Create it with the checksums of the plain files beside the data files, which it reads."""
        return cls(directory, pieces, {name: whole_file(directory / name) for name in plain_files})

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Read what ``write`` wrote.

        Raises:
            CheckpointError: no whole checkpoint, or the checksums themselves are damaged.
        """
        path = directory / CHECKSUMS_FILE
        if not path.is_file():  # a pipe would never end
            raise not_whole(directory, f"{CHECKSUMS_FILE} is missing")
        try:
            text = path.read_bytes()
            if not text:
                raise damaged(directory, f"{CHECKSUMS_FILE} is empty")
            outer = json.loads(text)
            content = outer["content"]
            if outer["crc32"] != zlib.crc32(_text(content)):
                raise ValueError("the checksum of the list differs")
            pieces = {file: [Piece(*entry) for entry in entries] for file, entries in content["pieces"].items()}
            if not all(map(is_file_name, pieces)):
                raise ValueError("a data file is none of the directory")
            return cls(directory, pieces, content["files"])
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise damaged(directory, f"{CHECKSUMS_FILE} cannot be read: {type(error).__name__}") from error

    def write(self) -> None:
        """Make the checkpoint whole. Raises OSError where the disk refuses."""
        pieces: dict[str, list[Piece]] = {}
        for (file, _), piece in self._pieces.items():
            pieces.setdefault(file, []).append(piece)
        content = {"pieces": pieces, "files": self._files}
        whole = {"crc32": zlib.crc32(_text(content)), "content": content}
        (self._directory / CHECKSUMS_FILE).write_bytes(_text(whole))

    def verify_plain_files(self, names: Sequence[str]) -> None:
        """Refuse files that are missing or differ, of those that are read as a whole."""
        for name in names:
            try:
                found = whole_file(self._directory / name)
            except FileNotFoundError as error:
                if name not in self._files:
                    raise CheckpointError(
                        f"was written by another trainer.backend, whose checkpoints have no {name}",
                        code="checkpoint-of-another-backend",
                        who=str(self._directory),
                        remedy="use the one that wrote it, or the Hugging Face model that its run exported",
                    ) from error
                raise not_whole(self._directory, f"{name} is missing") from error
            except OSError as error:
                raise damaged(self._directory, f"{name} cannot be read: {error.strerror}") from error
            written = self._files.get(name)
            if found != written:
                fault = None if written is None else length_fault(found[0], written[0])
                raise damaged(self._directory, f"{name} {fault or 'is not as it was written'}")

    def verify_lengths(self) -> None:
        """Refuse data files that are missing, cut off or longer than written, whether what they lack is read or not."""
        missing = sorted(name for name in self._lengths if not (self._directory / name).is_file())
        if missing:
            raise damaged(self._directory, f"files that its index lists are missing: {listed(missing)}")
        for name in sorted(self._lengths):
            self._verify_length(name, (self._directory / name).stat().st_size)

    def require_files(self, names: Collection[str]) -> None:
        """Reject names of data files that have no checksums, or are no files there."""
        known = (name for name in names if name in self._lengths and (self._directory / name).is_file())
        if missing := sorted({*names} - {*known}):
            raise damaged(self._directory, f"files that its index lists are missing: {listed(missing)}")

    def _verify_length(self, name: str, found: int) -> None:
        fault = length_fault(found, self._lengths.get(name, found))
        if fault is None:
            return
        # A tensor may lie in several pieces, whose names tell where they begin.
        lost = dict.fromkeys(
            piece.name.partition(" from [")[0]
            for (file, offset), piece in sorted(self._pieces.items())
            if file == name and offset + piece.length > found
        )
        lacks = f", and lacks {listed(list(lost), _SHOWN)}" if lost else ""
        raise damaged(self._directory, f"{name} {fault}{lacks}")

    def verify_piece(self, file: IO[bytes], name: str, offset: int, length: int) -> None:
        """Refuse ``length`` bytes at ``offset`` of the open data file ``name`` that are not those written."""
        piece = self._pieces.get((name, offset))
        if piece is None or piece.length != length:
            raise damaged(self._directory, f"{name} holds no piece of {length} bytes at byte {offset}")
        self._verify_length(name, file.seek(0, os.SEEK_END))
        if not piece.is_in(file):
            raise self._differs(name, piece)

    def verify_bytes(self, content: bytes, name: str, offset: int) -> None:
        """Compare bytes that were read at ``offset`` of the data file ``name``; raises as ``verify_piece``."""
        piece = self._pieces.get((name, offset))
        if piece is None:
            raise damaged(self._directory, f"{name} holds no piece at byte {offset}")
        if piece.length != len(content) or zlib.crc32(content) != piece.crc32:
            raise self._differs(name, piece)

    def _differs(self, name: str, piece: Piece) -> CheckpointError:
        end = piece.offset + piece.length
        return damaged(self._directory, f"{name}: bytes {piece.offset} to {end}, {piece.name}, are not as written")


def damaged(directory: Path, reason: str) -> CheckpointError:
    """The one sentence about a damaged checkpoint, with the remedy for a run's or a converted one."""
    remedy = damage_remedy(directory, f"resume from a checkpoint before {directory.parent.name}")  # step-N/trainer
    return CheckpointError(f"is damaged ({reason})", code="checkpoint-damaged", who=str(directory), remedy=remedy)


def not_whole(directory: Path, reason: str) -> CheckpointError:
    """The one sentence about a checkpoint that lacks what is written last, or was never one."""
    return CheckpointError(
        f"not a whole training checkpoint ({reason})",
        code="checkpoint-not-whole",
        who=str(directory),
        remedy=damage_remedy(directory, "use another one"),
    )


class VerifyingReader(FileSystemReader):
    """torch's reader of a checkpoint, which compares each piece once before it is loaded, and executes none."""

    def __init__(self, path: str | Path, checksums: Checksums) -> None:
        super().__init__(path)
        self._checksums = checksums
        self._verified: set[tuple[str, int]] = set()

    def read_metadata(self, *_: Any, **options: Any) -> Metadata:
        with Path(self._get_metadata_path(options.get("rank"))).open("rb") as file:
            metadata = read_index(file)
        self._checksums.require_files({info.relative_path for info in metadata.storage_data.values()})
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        return super().read_data(plan, DataPlanner(planner))  # type: ignore[arg-type]  # all that it uses of one

    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        place = (sinfo.relative_path, sinfo.offset)
        if place not in self._verified:
            self._checksums.verify_piece(file, sinfo.relative_path, sinfo.offset, sinfo.length)
            self._verified.add(place)
        return super()._slice_file(file, sinfo)


def _text(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
