"""One checkpoint of a run on disk: its state, and a check that its files are as written."""

import errno
import json
import os
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from slime_like.errors import CheckpointError
from slime_like.system.disk import length_fault

TRAINER, STATE = "trainer", "state.json"
NAME = re.compile(r"step-\d{6,}")
"""Name of a checkpoint directory. A copy under another name is not ours to remove."""
FILES, LENGTHS = "files", "lengths"
_CHECKSUM = "crc32"

UNUSABLE = ("checkpoint-damaged", "checkpoint-incomplete", "checkpoint-not-whole")
"""Error codes for checkpoints whose files are not as written."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint on disk, with state for the trainers and the driver.

    Attributes:
        passed_over: note on newer, damaged checkpoints; empty if there are none.
    """

    path: Path
    step: int
    state: dict[str, Any]
    passed_over: str = ""

    def model(self, name: str) -> Path:
        """Return the directory with the state of a model, by the name of its ranks.

        Raises:
            CheckpointError: a run without this model wrote the checkpoint.
        """
        if not (found := self.path / name).is_dir() and name != TRAINER:
            raise CheckpointError(
                f"{self.path} was written by a run without a {name}",
                code=f"no-{name}",
                who="resume",
                remedy="keep algorithm.advantage, or start a new run from its Hugging Face export",
            )
        return found

    def data_position(self) -> dict[str, Any]:
        """Return the position of the prompts to resume from.

        Raises:
            CheckpointError: the run that wrote it read no prompts, but saved rollouts.
        """
        if "data" not in self.state:
            raise CheckpointError(
                f"{self.path} was written by a run on saved rollouts, so it has no position in data.train",
                code="no-data-position",
                who="resume",
                remedy="resume with debug.load_rollouts, or start a new run from its Hugging Face export",
            )
        return dict(self.state["data"])

    def file(self, name: str) -> Path:
        """Return the path of a file written by ``CheckpointStore.written``.

        Raises:
            CheckpointError: the file is missing, or not as it was written.
        """
        path = self.path / name
        try:
            if not path.is_file():  # a pipe would never end
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            intact = zlib.crc32(path.read_bytes()) == self.state[FILES][name]
        except (OSError, LookupError, TypeError) as error:
            raise self.unusable(f"{path} is missing ({error})", "checkpoint-incomplete") from error
        if not intact:
            raise self.unusable(f"{path} is not as it was written", "checkpoint-damaged")
        return path

    def require_whole(self) -> None:
        """Check everything that can be checked without reading the trainers' files.

        Raises:
            CheckpointError: a file is missing or has lost bytes, or one of the driver's files is not as it was written.
        """
        for name in self.state.get(FILES, {}):
            self.file(name)
        for name, length in self.state.get(LENGTHS, {}).items():
            path = self.path / name
            if not path.is_file():
                raise self.unusable(f"{path} is missing", "checkpoint-incomplete")
            if fault := length_fault(path.stat().st_size, length):
                raise self.unusable(f"{path} {fault}", "checkpoint-damaged")

    def unusable(self, problem: str, code: str) -> CheckpointError:
        """Describe a fault of the checkpoint's files."""
        remedy = f"resume from an older checkpoint in {self.path.parent}"
        return CheckpointError(problem, code=code, who="resume", remedy=remedy)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Open the checkpoint at ``path``.

        Raises:
            CheckpointError: it is missing, or its state cannot be read; the message has a remedy.
        """
        file = path / STATE
        if not path.is_dir():
            raise _no_checkpoint(path, "no directory")
        try:
            if not file.is_file():  # a pipe would never end
                raise FileNotFoundError
            state = json.loads(file.read_text(encoding="utf-8"))
            if state.pop(_CHECKSUM) != _checksum(state):
                raise ValueError("it is not as it was written")
            return cls(path.resolve(), state["step"], state)
        except FileNotFoundError as error:
            raise _no_checkpoint(path, f"{STATE} is missing") from error
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise cls(path, 0, {}).unusable(f"{file} is damaged ({error})", "checkpoint-damaged") from error


def _no_checkpoint(path: Path, why: str) -> CheckpointError:
    remedy = f"resume from another checkpoint in {path.parent}, or start over with resume: never"
    return CheckpointError(f"{path} is not a checkpoint ({why})", code="no-checkpoint", who="resume", remedy=remedy)


def write_state(directory: Path, step: int, state: dict[str, Any]) -> None:
    """Write the state and its CRC-32 for ``Checkpoint.read``."""
    content = json.loads(json.dumps({"step": step, **state}))  # normalizes keys and numbers
    text = json.dumps({**content, _CHECKSUM: _checksum(content)}, indent=1)
    (directory / STATE).write_text(text, encoding="utf-8")


def _checksum(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def saved_steps(root: Path) -> list[Path]:
    """List the directories of whole checkpoints."""
    return [path for path in root.glob("step-*") if NAME.fullmatch(path.name)]
