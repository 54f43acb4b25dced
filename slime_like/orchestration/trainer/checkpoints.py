"""Checkpoints of a run: written under a temporary name, whole before they are visible, committed by one rename."""

import contextlib
import errno
import json
import os
import re
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from slime_like.errors import CheckpointError, SlimeLikeError
from slime_like.interfaces import TrainerBackend
from slime_like.orchestration.trainer.group import TrainerGroup
from slime_like.orchestration.trainer.rank import TrainerRank
from slime_like.system.disk import length_fault, link_tree, refusal, sync, sync_tree

_TRAINER, _STATE, _PARTIAL = "trainer", "state.json", ".partial-"
_NAME = re.compile(r"step-\d{6,}")  # a copy that somebody made under another name is not ours to remove
_FORMER, _REMOVED = ".former-", ".removed-"  # whole, until its successor has its name; and what is to go
_CHECKSUM, _FILES, _LENGTHS = "crc32", "files", "lengths"
_RESCUE_TIMEOUT_S = 5.0

UNUSABLE = ("checkpoint-damaged", "checkpoint-incomplete", "checkpoint-not-whole")
"""Codes of errors about a checkpoint whose files are not those that were written."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint on disk: what to hand to the trainers, and what the driver remembers.

    Attributes:
        passed_over: newer checkpoints that are damaged, as a note; empty where there are none.
    """

    path: Path
    step: int
    state: dict[str, Any]
    passed_over: str = ""

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
            if not path.is_file():  # a pipe would never end
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            intact = zlib.crc32(path.read_bytes()) == self.state[_FILES][name]
        except (OSError, LookupError, TypeError) as error:
            raise self.unusable(f"{path} is missing ({error})", "checkpoint-incomplete") from error
        if not intact:
            raise self.unusable(f"{path} is not as it was written", "checkpoint-damaged")
        return path

    def require_whole(self) -> None:
        """Compare what can be compared without reading the trainers' files.

        Raises:
            CheckpointError: a file is missing or has lost bytes, or one of the driver's is not as it was written.
        """
        for name in self.state.get(_FILES, {}):
            self.file(name)
        for name, length in self.state.get(_LENGTHS, {}).items():
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
            CheckpointError: it is missing, or its state cannot be read; the message names a remedy.
        """
        file = path / _STATE
        if not path.is_dir():
            raise _no_checkpoint(path, "no directory")
        try:
            if not file.is_file():  # a pipe would never end
                raise FileNotFoundError
            state = json.loads(file.read_text(encoding="utf-8"))
            if state.pop(_CHECKSUM) != _checksum(state):
                raise ValueError("it is not as it was written")
            if problem := _state_problem(state):
                raise ValueError(problem)
            return cls(path.resolve(), state["step"], state)
        except FileNotFoundError as error:
            raise _no_checkpoint(path, f"{_STATE} is missing") from error
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise cls(path, 0, {}).unusable(f"{file} is damaged ({error})", "checkpoint-damaged") from error


def _state_problem(state: dict[str, Any]) -> str | None:
    """What no run has written, although the checksum fits."""
    step, data = state["step"], state.get("data", {})
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        return "its step must be a whole number"
    for name in (_FILES, _LENGTHS):
        entries = state.get(name, {})
        if not isinstance(entries, dict) or not all(isinstance(value, int) for value in entries.values()):
            return f"{name} must be a mapping of whole numbers"
    return None if isinstance(data, dict) else "data must be a mapping"


def _no_checkpoint(path: Path, why: str) -> CheckpointError:
    others = (other for other in _saved(path.parent) if os.path.realpath(other) != os.path.realpath(path))
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
        note: reports what could not be removed; it is tried again after the next save.
    """

    def __init__(self, run_dir: Path, keep: int, trainers: TrainerGroup, note: Callable[[str], None]) -> None:
        self._root = run_dir / "checkpoints"
        self._keep = keep
        self._trainers = trainers
        self._note = note
        self._started: Path | None = None
        self._also: dict[str, Callable[[Path], None]] = {}
        self._linked: dict[str, Callable[[], Path | None]] = {}
        _put_back(self._root)
        self._remove([*self._root.glob(f"{_PARTIAL}*"), *self._root.glob(f"{_FORMER}*")])  # of a save that was killed

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
            shutil.rmtree(partial, ignore_errors=True)  # the next start tries again

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
        """Give the files their name: after a power failure, too, ``latest`` leads to this checkpoint or the last."""
        partial, former, root = _partial(final), final.with_name(f"{_FORMER}{final.name}"), self._root
        files = (path for path in partial.rglob("*") if path.is_file() and path != partial / _STATE)
        lengths = {str(path.relative_to(partial)): path.stat().st_size for path in files}
        written = Checkpoint.read(partial)
        write_state(partial, written.step, {**written.state, _LENGTHS: lengths})
        sync_tree(partial)
        if final.exists():  # the same step of an earlier start
            final.rename(former)
        partial.rename(final)
        for directory in (root, root.parent, root.absolute().parent.parent):  # the first save may have made them
            sync(directory)
        link = root / ".latest-new"
        link.unlink(missing_ok=True)
        link.symlink_to(final.name)
        link.replace(root / "latest")
        sync(root)
        # Of the old ones first those of later steps, left by a run that resumed before them.
        saved = sorted(_saved(root), key=lambda path: (_step(path) <= _step(final), _step(path)))
        self._remove([*root.glob(f"{_FORMER}*"), *saved[: -self._keep]])

    def _remove(self, paths: Iterable[Path]) -> None:
        """Remove directories, and those that could not be removed before; a half of one never has its name."""
        problems: list[str] = []
        for path in paths:
            with _noting(path, problems):
                path.rename(path.with_name(f"{_REMOVED}{time.time_ns()}-{path.name}"))
        if removed := list(self._root.glob(f"{_REMOVED}*")):
            sync(self._root)
        for path in removed:
            with _noting(path, problems):
                shutil.rmtree(path)
        for problem in problems:
            self._note(problem)

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


def latest_checkpoint(run_dir: Path) -> Path | None:
    """The checkpoint that a run in ``run_dir`` resumes from: the target of ``latest`` or, in a copy of the directory
    without its links, the highest step, as every checkpoint with such a name is whole; ``None`` without one."""
    root = run_dir / "checkpoints"
    latest = root / "latest"
    return latest if latest.is_symlink() else max(_saved(root), key=_step, default=None)


def _put_back(root: Path) -> None:
    """Give a checkpoint its name again where the run ended before its successor had it."""
    for former in root.glob(f"{_FORMER}*"):
        if not (place := root / former.name.removeprefix(_FORMER)).exists():
            former.rename(place)


def newest_whole(run_dir: Path, found_damaged: Mapping[Path, str] = MappingProxyType({})) -> Checkpoint | None:
    """Open the latest checkpoint of a run or, where it is damaged, the newest whole one; ``None`` without any.

    Args:
        found_damaged: resolved paths of checkpoints that a closer look has rejected, each with its problem.

    Raises:
        CheckpointError: none is whole.
    """
    root = run_dir / "checkpoints"
    _put_back(root)
    if (latest := latest_checkpoint(run_dir)) is None:
        return None
    name = latest.readlink().name if latest.is_symlink() else latest.name
    last = int(name.partition("-")[2]) if _NAME.fullmatch(name) else 0
    # Later steps are of a run that resumed before them: they come last.
    others = sorted(_saved(root), key=lambda path: (_step(path) <= last, _step(path)), reverse=True)
    damaged: list[str] = []
    for path in (latest, *(path for path in others if path.name != name)):
        if (problem := found_damaged.get(Path(os.path.realpath(path)))) is not None:
            damaged.append(problem)
            continue
        try:
            checkpoint = Checkpoint.read(path)
            checkpoint.require_whole()
        except CheckpointError as error:
            damaged.append(str(error.problem))
        else:
            note = f"passed over: {'; '.join(damaged)}; resuming from {checkpoint.path}" if damaged else ""
            return replace(checkpoint, passed_over=note)
    return Checkpoint.read(latest)  # the trainers' own sentence names what is lost


@contextlib.contextmanager
def _noting(path: Path, problems: list[str]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        problems.append(f"{path} could not be removed ({error.strerror}); it is tried again after the next save")


def _saved(root: Path) -> list[Path]:
    return [path for path in root.glob("step-*") if _NAME.fullmatch(path.name)]


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.partition("-")[2])


def _partial(final: Path) -> Path:
    return final.with_name(f"{_PARTIAL}{final.name}")
