"""A directory being written: hidden until complete, resumed after an interruption."""

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple, Self

from backends.common.checkpoint.integrity import ByteRange
from slime_like.errors import CheckpointError
from slime_like.system.disk import replace_directory, sync_tree

_JOURNAL = "journal.jsonl"


class FinishedFile(NamedTuple):
    """A complete, durable data file: its name relative to the output, and its pieces in order.

    Attributes:
        nan: Hugging Face tensors with NaN or infinity in them.
        too_large: Hugging Face tensors with values that became infinite.
    """

    name: str
    pieces: tuple[ByteRange, ...]
    nan: tuple[str, ...] = ()
    too_large: tuple[str, ...] = ()

    def to_json(self) -> str:
        return json.dumps(self._asdict())

    @classmethod
    def from_json(cls, line: str) -> Self:
        raw = json.loads(line)
        pieces = tuple(ByteRange(*entry) for entry in raw["pieces"])
        return cls(raw["name"], pieces, tuple(raw["nan"]), tuple(raw["too_large"]))


@dataclass(slots=True)
class PartialOutput:
    """Output directory of a conversion: next to ``final``, under a hidden name, with a journal of finished files.

    Attributes:
        final: appears complete, by one rename.
        finished: unchanged files of an earlier, interrupted run, by name.
    """

    final: Path
    finished: dict[str, FinishedFile] = field(default_factory=dict)
    _journal: IO[str] | None = None

    @property
    def path(self) -> Path:
        return self.final.parent / f".{self.final.name}.partial"

    def add(self, file: FinishedFile) -> None:
        """Record a complete file: it will not be written again."""
        assert self._journal is not None
        self._journal.write(file.to_json() + "\n")
        self._journal.flush()
        os.fsync(self._journal.fileno())

    def commit(self) -> None:
        """Move the output to its final name, replacing what was there.

        Raises:
            OSError: the disk rejected the write.
        """
        (self.path / _JOURNAL).unlink()
        sync_tree(self.path)
        replace_directory(self.path, self.final)


@contextlib.contextmanager
def partial_output(final: Path, request: Mapping[str, Any]) -> Iterator[PartialOutput]:
    """Open the output of ``request`` (plain JSON: everything that determines the output), new or resumed.

    After an error or an interruption the output stays hidden; the same request resumes it, another one clears it.

    Raises:
        CheckpointError: the disk rejects a write, or another process is writing the same output.
    """
    output = PartialOutput(Path(final))
    wanted = json.dumps(request, sort_keys=True)
    with contextlib.ExitStack() as stack:
        try:
            output.path.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((output.path / _JOURNAL).open("a+", encoding="utf-8"))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock.seek(0)
            lines = lock.read().splitlines()
            if lines[:1] == [wanted]:
                output.finished = _still_whole(output.path, lines[1:])
            else:
                for path in output.path.iterdir():
                    if path.is_dir():
                        shutil.rmtree(path)
                    elif path.name != _JOURNAL:
                        path.unlink()
            # Rewrite it without files that are no longer complete, and without a line that was cut off.
            lock.truncate(0)
            lock.write("\n".join([wanted, *(file.to_json() for file in output.finished.values())]) + "\n")
            lock.flush()
            os.fsync(lock.fileno())
        except BlockingIOError as error:
            raise CheckpointError(
                "another process is writing it", code="output-in-use", who=str(final), remedy="wait for it, or end it"
            ) from error
        except OSError as error:
            raise CheckpointError(
                f"could not be written ({error})",
                code="write-refused",
                who=str(output.path),
                remedy="choose another directory",
            ) from error
        output._journal = lock
        yield output


def _still_whole(directory: Path, lines: Sequence[str]) -> dict[str, FinishedFile]:
    finished = {}
    for line in lines:
        try:
            file = FinishedFile.from_json(line)
        except (ValueError, KeyError, TypeError):
            continue  # the line being written when the process ended
        path, end = directory / file.name, max((piece.offset + piece.length for piece in file.pieces), default=0)
        if path.is_file() and path.stat().st_size == end:
            with path.open("rb") as content:
                if all(piece.is_in(content) for piece in file.pieces):
                    finished[file.name] = file
    return finished
