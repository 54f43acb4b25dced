"""Checkpoints of a run: written under a temporary name, whole before they are visible, committed by one rename."""

import contextlib
import json
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from slime_like.errors import CheckpointError, SlimeLikeError
from slime_like.interfaces import TrainerBackend
from slime_like.orchestration.trainer.group import TrainerGroup
from slime_like.orchestration.trainer.rank import TrainerRank
from slime_like.system.disk import refusal

_TRAINER, _STATE, _PARTIAL = "trainer", "state.json", ".partial-"
_NAME = re.compile(r"step-\d{6,}")  # a copy that somebody made under another name is not ours to remove
_CHECKSUM, _FILES = "crc32", "files"
_RESCUE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint on disk: what to hand to the trainers, and what the driver remembers."""

    path: Path
    step: int
    state: dict[str, Any]

    @property
    def trainer(self) -> Path:
        return self.path / _TRAINER

    def data_position(self) -> dict[str, Any]:
        """Position of the prompts to resume from.

        Raises:
            CheckpointError: the run that wrote it read no prompts, but kept rollouts.
        """
        if "data" not in self.state:
            raise CheckpointError(
                f"{self.path} is of a run on kept rollouts and has no position in data.train",
                code="no-data-position",
                who="resume",
                remedy="resume it with debug.load_rollouts, or start from its Hugging Face export",
            )
        position: dict[str, Any] = self.state["data"]
        return position

    def file(self, name: str) -> Path:
        """A file that ``CheckpointStore.also_write`` put there.

        Raises:
            CheckpointError: it is missing, or not as it was written.
        """
        path = self.path / name
        try:
            intact = zlib.crc32(path.read_bytes()) == self.state[_FILES][name]
        except (OSError, LookupError, TypeError) as error:
            raise self.unusable(f"{path} is missing ({error})", "checkpoint-incomplete") from error
        if not intact:
            raise self.unusable(f"{path} is not as it was written", "checkpoint-damaged")
        return path

    def unusable(self, problem: str, code: str) -> CheckpointError:
        """Describe a fault of the checkpoint's files."""
        remedy = f"resume from an older checkpoint in {self.path.parent}"
        return CheckpointError(problem, code=code, who="resume", remedy=remedy)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Open the checkpoint at ``path``.

        Raises:
            CheckpointError: it is missing, or its state cannot be read; the message names a remedy.
        """
        file = path / _STATE
        if not path.is_dir():
            raise _no_checkpoint(path, "no directory")
        try:
            state = json.loads(file.read_text(encoding="utf-8"))
            if state.pop(_CHECKSUM) != _checksum(state):
                raise ValueError("it is not as it was written")
            return cls(path.resolve(), int(state["step"]), state)
        except FileNotFoundError as error:
            raise _no_checkpoint(path, f"{_STATE} is missing") from error
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise cls(path, 0, {}).unusable(f"{file} is damaged ({error})", "checkpoint-damaged") from error


def _no_checkpoint(path: Path, why: str) -> CheckpointError:
    others = (other for other in _saved(path.parent) if other.resolve() != path.resolve())
    names = sorted(other.name for other in others if (other / _STATE).is_file())
    whole = f" of another one, such as {path.parent / names[-1]}," if names else " of another one,"
    remedy = f"give the path{whole} or start over with resume: never"
    return CheckpointError(f"{path} is not a checkpoint ({why})", code="no-checkpoint", who="resume", remedy=remedy)


def write_state(directory: Path, step: int, state: dict[str, Any]) -> None:
    """Write the state for ``Checkpoint.read``, with its CRC-32."""
    content = json.loads(json.dumps({"step": step, **state}))  # keys and numbers as they will be read
    text = json.dumps({**content, _CHECKSUM: _checksum(content)}, indent=1)
    (directory / _STATE).write_text(text, encoding="utf-8")


def _checksum(content: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


class CheckpointStore:
    """``RUN_DIR/checkpoints/step-N`` with a ``latest`` link; a killed save never damages an older checkpoint.

    Args:
        keep: newest checkpoints that stay after a save.
    """

    def __init__(self, run_dir: Path, keep: int, trainers: TrainerGroup) -> None:
        self._root = run_dir / "checkpoints"
        self._keep = keep
        self._trainers = trainers
        self._started: Path | None = None
        self._also: dict[str, Callable[[Path], None]] = {}
        self._linked: dict[str, Callable[[], Path | None]] = {}
        for partial in self._root.glob(f"{_PARTIAL}*"):  # a save that was killed
            shutil.rmtree(partial)

    def also_write(self, write: Callable[[Path], None], name: str) -> None:
        """``write`` the file ``name`` into every later checkpoint."""
        self._also[name] = write

    def also_link(self, source: Callable[[], Path | None], name: str) -> None:
        """Link the files of the directory that ``source`` names, if any, into every later checkpoint as
        ``name``. They must not be written to any more; readers check their checksums."""
        self._linked[name] = source

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Write step ``step``; ``state`` (JSON) holds what the driver must remember, such as the data position.

        Raises:
            CheckpointError: the disk refused; what was written is removed, older checkpoints are untouched.
        """
        final = self._write(step, state, "saving a checkpoint", TrainerBackend.save)
        with self._whole_or_removed(final):
            self._commit(final)
        return final

    def start(self, step: int, state: dict[str, Any]) -> None:
        """Start a save of a copy of the present state; it counts once ``commit_written`` or ``finish`` returns it.

        The one started before must have been finished.
        """
        self._started = self._write(step, state, "copying a checkpoint to host memory", TrainerRank.start_save)

    def commit_written(self, timeout_s: float | None = None) -> Path | None:
        """Commit the save that was started if all its files are written; its path if so.

        Raises:
            CheckpointError: a rank could not write its files, or the disk refuses now; as in ``save``.
        """
        if self._started is None:
            return None
        with self._whole_or_removed(self._started):
            phase = "writing a checkpoint in the background"
            written = all(self._trainers.ranks.start(phase, TrainerRank.is_save_written).result(timeout_s))
        return self.finish(timeout_s) if written else None

    def finish(self, timeout_s: float | None = None) -> Path | None:
        """Wait, at most ``trainer.step_timeout_s``, for the save that was started, and commit it; its path.

        Raises:
            CheckpointError, TrainerError: as in ``commit_written``, or it took too long.
        """
        if self._started is None:
            return None
        final = self._started
        with self._whole_or_removed(final):
            self._trainers.ranks.start("finishing a checkpoint", TrainerRank.finish_save).result(timeout_s)
            self._commit(final)
        self._started = None
        return final

    def rescue(self) -> None:
        """Commit what a failing run has written already, if its trainers still answer. Called before they end."""
        with contextlib.suppress(SlimeLikeError):  # the error that ended the run is reported; this save never counted
            self.commit_written(_RESCUE_TIMEOUT_S)

    def abandon(self) -> None:
        """Remove what never became a checkpoint. Called when no rank writes any more."""
        for partial in self._root.glob(f"{_PARTIAL}*"):
            shutil.rmtree(partial, ignore_errors=True)  # what cannot be removed makes the next start fail

    def _write(self, step: int, state: dict[str, Any], phase: str, method: Callable[[Any, Path], None]) -> Path:
        """Write all that the driver adds, and have ``method`` of the ranks begin; the path once it is committed."""
        final = self._root / f"step-{step:06d}"
        with self._whole_or_removed(final):
            partial = _partial(final)
            partial.mkdir(parents=True)
            checksums = {}
            for name, write in self._also.items():
                write(partial / name)
                checksums[name] = zlib.crc32((partial / name).read_bytes())
            for name, source in self._linked.items():
                if (files := source()) is not None:
                    link_tree(files, partial / name)
            write_state(partial, step, {**state, _FILES: checksums})
            self._trainers.ranks.call(phase, method, partial / _TRAINER)
        return final

    def _commit(self, final: Path) -> None:
        shutil.rmtree(final, ignore_errors=True)  # the same step of an earlier start
        _partial(final).rename(final)
        link = self._root / ".latest-new"
        link.unlink(missing_ok=True)
        link.symlink_to(final.name)
        link.replace(self._root / "latest")
        # Of the old ones first those of later steps, left by a run that resumed before them.
        saved = sorted(_saved(self._root), key=lambda path: (_step(path) <= _step(final), _step(path)))
        for old in saved[: -self._keep]:
            shutil.rmtree(old)

    @contextlib.contextmanager
    def _whole_or_removed(self, final: Path) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._started = None
            # Before the removal, which makes room.
            refused = refusal(_partial(final), error.strerror or str(error)) if isinstance(error, OSError) else None
            shutil.rmtree(_partial(final), ignore_errors=True)
            if refused is not None:
                raise CheckpointError(refused, code="disk-refused") from error
            raise


def link_tree(source: Path, target: Path) -> None:
    """The files of ``source`` under new names, without a copy where the file system has such links.

    Raises:
        OSError: the disk refused.
    """

    def link_or_copy(source: str, target: str) -> None:
        try:
            os.link(source, target)
        except OSError:  # another file system, or one without links; what hinders a copy, too, is raised by it
            shutil.copyfile(source, target)

    shutil.copytree(source, target, copy_function=link_or_copy)


def latest_checkpoint(run_dir: Path) -> Path | None:
    """The checkpoint that a run in ``run_dir`` resumes from: the target of ``latest`` or, in a copy of the directory
    without its links, the highest step, as every checkpoint with such a name is whole; ``None`` without one."""
    root = run_dir / "checkpoints"
    latest = root / "latest"
    return latest if latest.is_symlink() else max(_saved(root), key=_step, default=None)


def _saved(root: Path) -> list[Path]:
    return [path for path in root.glob("step-*") if _NAME.fullmatch(path.name)]


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.partition("-")[2])


def _partial(final: Path) -> Path:
    return final.with_name(f"{_PARTIAL}{final.name}")
