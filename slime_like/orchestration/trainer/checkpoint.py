"""Checkpoints of a run: written under a temporary name, complete before they are visible, committed by one rename."""

import contextlib
import errno
import json
import os
import re
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from slime_like.errors import CheckpointError, ConfigError, SlimeLikeError
from slime_like.orchestration.trainer.model_ranks import ModelRanks
from slime_like.orchestration.trainer.rank import TrainerRank
from slime_like.system.disk import bytes_below, length_fault, link_tree, refusal, sync, sync_tree

TRAINER, STATE = "trainer", "state.json"
NAME = re.compile(r"step-\d{6,}")
"""Name of a checkpoint directory. A copy under another name is not ours to remove."""
FILES, LENGTHS = "files", "lengths"
_CHECKSUM = "crc32"

_PARTIAL = ".partial-"
_FORMER, _REMOVED = ".former-", ".removed-"  # kept until its successor has the name; to be deleted
_RESCUE_TIMEOUT_S = 5.0

UNUSABLE = ("checkpoint-damaged", "checkpoint-incomplete", "checkpoint-not-whole")
"""Error codes for checkpoints whose files are not as written."""
REFUSED = ("disk-refused", "write-refused", "directory-refused", "failed-on-another-rank")
"""Error codes of saves that the disk refused, maybe on another rank than the one whose error came first."""


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


class CheckpointStore:
    """Store of ``RUN_DIR/checkpoints/step-N`` with a ``latest`` link. A killed save never damages older checkpoints.

    Args:
        models: trained models, whose state every checkpoint contains.
        keep: number of newest checkpoints to keep after a save.
        keep_every: also keep checkpoints of steps divisible by this; 0 for none.
        note: reports files that could not be removed; removal is tried again after the next save.
        resumed: step that the run resumed after; checkpoints of later steps are removed first.

    Attributes:
        written: writes further files of a checkpoint, by name.
        linked: returns directories whose files are linked into a checkpoint, if any, by name there.
        newest: checkpoint that this start resumed from or wrote last; ``None`` before the first one.
    """

    def __init__(
        self,
        run_dir: Path,
        keep: int,
        models: Sequence[ModelRanks],
        note: Callable[[str], None],
        resumed: int | None = None,
        keep_every: int = 0,
    ) -> None:
        self._root = run_dir / "checkpoints"
        self._keep, self._keep_every = keep, keep_every
        self._models = models
        self._note = note
        self._left = {path for path in saved_steps(self._root) if resumed is not None and _step(path) > resumed}
        self._started: Path | None = None
        self.written: dict[str, Callable[[Path], None]] = {}
        self.linked: dict[str, Callable[[], Path | None]] = {}
        self.newest: Checkpoint | None = None
        _put_back(self._root)
        self._remove([*self._root.glob(f"{_PARTIAL}*"), *self._root.glob(f"{_FORMER}*")])  # left by a killed save

    def save(self, step: int, state: dict[str, Any]) -> Path:
        """Save step ``step``. ``state`` (JSON) holds what the driver must remember, such as the data position.

        Raises:
            CheckpointError: the disk refused; what was written is removed, and older checkpoints are untouched.
        """
        final = self._write(step, state, "saving a checkpoint", TrainerRank.save)
        with self._whole_or_removed(final):
            self._commit(final)
        return final

    def start(self, step: int, state: dict[str, Any]) -> None:
        """Start to save a copy of the current state. It counts once ``commit_written`` or ``finish`` returns it.

        The previously started save must be finished.
        """
        self._started = self._write(step, state, "copying a checkpoint to host memory", TrainerRank.start_save)

    def commit_written(self, timeout_s: float | None = None) -> Path | None:
        """Commit the started save if all its files are written, and return its path.

        Raises:
            CheckpointError: a rank could not write its files, or the disk refuses now; see ``save``.
        """
        if self._started is None:
            return None
        phase = "writing a checkpoint in the background"
        with self._whole_or_removed(self._started):
            asked = [model.start(phase, TrainerRank.is_written) for model in self._models]
            written = all(all(answers.result(timeout_s)) for answers in asked)
        return self.finish(timeout_s) if written else None

    def finish(self, timeout_s: float | None = None) -> Path | None:
        """Wait at most ``trainer.step_timeout_s`` for the started save, commit it, and return its path.

        Raises:
            CheckpointError, TrainerError: see ``commit_written``; or it took too long.
        """
        if self._started is None:
            return None
        final = self._started
        with self._whole_or_removed(final):
            for model in self._models:
                model.start("finishing a checkpoint", TrainerRank.finish_save).result(timeout_s)
            self._commit(final)
        self._started = None
        return final

    def rescue(self) -> None:
        """Commit what a failing run has already written, if its trainers still answer. Call before they end."""
        with contextlib.suppress(SlimeLikeError):  # the error that ended the run is reported; this save never counted
            self.commit_written(_RESCUE_TIMEOUT_S)

    def abandon(self) -> None:
        """Remove unfinished checkpoints. Call when no rank writes any more."""
        for partial in self._root.glob(f"{_PARTIAL}*"):
            shutil.rmtree(partial, ignore_errors=True)  # the next start tries again

    def _write(self, step: int, state: dict[str, Any], phase: str, method: Callable[[Any, Path], None]) -> Path:
        """Write the driver's files and start ``method`` on the ranks. Return the path that it gets on commit."""
        final = self._root / f"step-{step:06d}"
        with self._whole_or_removed(final):
            partial = _partial(final)
            self.abandon()  # what is left of a failed save, to which another rank was still writing
            self._require_room()
            partial.mkdir(parents=True)
            checksums = {}
            for name, write in self.written.items():
                write(partial / name)
                checksums[name] = zlib.crc32((partial / name).read_bytes())
            for name, source in self.linked.items():
                if (files := source()) is not None:
                    link_tree(files, partial / name)
            write_state(partial, step, {**state, FILES: checksums})
            for model in self._models:
                with model.on_devices():
                    model.call(phase, method, partial / model.name)
        return final

    def _require_room(self) -> None:
        """Raise OSError if there is less room than the last checkpoint takes, besides links. A save in the background
        that fills the disk would also stop the metrics."""
        if (last := max(saved_steps(self._root), key=_step, default=None)) is not None:
            needed = bytes_below(last, self.linked)
            if shutil.disk_usage(self._root).free < needed:
                raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} for {needed} bytes, the size of {last.name}")

    def _commit(self, final: Path) -> None:
        """Give the files their name. Even after a power failure, ``latest`` leads to this checkpoint or the last."""
        partial, former, root = _partial(final), final.with_name(f"{_FORMER}{final.name}"), self._root
        files = (path for path in partial.rglob("*") if path.is_file() and path != partial / STATE)
        lengths = {str(path.relative_to(partial)): path.stat().st_size for path in files}
        written = Checkpoint.read(partial)
        write_state(partial, written.step, {**written.state, LENGTHS: lengths})
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
        self.newest = replace(written, path=final)
        self._left.discard(final)
        # Remove checkpoints first that are later than the resumed step: the run may have skipped damaged ones.
        saved = sorted(
            saved_steps(root), key=lambda path: (path not in self._left, _step(path) <= _step(final), _step(path))
        )
        every = self._keep_every
        old = [path for path in saved[: -self._keep] if path in self._left or not every or _step(path) % every]
        self._remove([*root.glob(f"{_FORMER}*"), *old])

    def _remove(self, paths: Iterable[Path]) -> None:
        """Remove directories, also earlier leftovers. A half-removed directory never has its original name."""
        for path in paths:
            with self._noting(path):
                path.rename(path.with_name(f"{_REMOVED}{time.time_ns()}-{path.name}"))
        if removed := list(self._root.glob(f"{_REMOVED}*")):
            sync(self._root)
        for path in removed:
            with self._noting(path):
                shutil.rmtree(path)

    @contextlib.contextmanager
    def _noting(self, path: Path) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._note(f"{path} could not be removed ({error.strerror}); the next save tries again")

    @contextlib.contextmanager
    def _whole_or_removed(self, final: Path) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._started = None
            # Before the removal, which frees space.
            refused = refusal(_partial(final), error.strerror or str(error)) if isinstance(error, OSError) else None
            shutil.rmtree(_partial(final), ignore_errors=True)
            if refused is not None:
                raise CheckpointError(refused, code="disk-refused") from error
            raise


def latest_checkpoint(run_dir: Path) -> Path | None:
    """Return the checkpoint that a run in ``run_dir`` resumes from, or ``None``: the target of ``latest``. A copy of
    the directory may lack links; then it is the highest step, since every named checkpoint is whole."""
    root = run_dir / "checkpoints"
    latest = root / "latest"
    return latest if latest.is_symlink() else max(saved_steps(root), key=_step, default=None)


def _put_back(root: Path) -> None:
    """Restore a checkpoint's name if the run ended before its successor took it."""
    for former in root.glob(f"{_FORMER}*"):
        if not (place := root / former.name.removeprefix(_FORMER)).exists():
            former.rename(place)


def newest_whole(run_dir: Path, found_damaged: Mapping[Path, str] = MappingProxyType({})) -> Checkpoint | None:
    """Open the latest checkpoint of a run, or the newest whole one if it is damaged; ``None`` if there are none.

    Args:
        found_damaged: problems of checkpoints that a closer look rejected, by resolved path.

    Raises:
        ConfigError: no checkpoint is whole. Another start would find the same.
    """
    root = run_dir / "checkpoints"
    _put_back(root)
    if (latest := latest_checkpoint(run_dir)) is None:
        return None
    name = latest.readlink().name if latest.is_symlink() else latest.name
    last = int(name.partition("-")[2]) if NAME.fullmatch(name) else 0
    # Later steps come last: they are from a run that resumed before them.
    others = sorted(saved_steps(root), key=lambda path: (_step(path) <= last, _step(path)), reverse=True)
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
    remedy = "restore one of them, or start over with resume: never"
    raise ConfigError(f"no checkpoint in {root} is whole: {'; '.join(damaged)}; {remedy}", code="no-whole-checkpoint")


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.partition("-")[2])


def _partial(final: Path) -> Path:
    return final.with_name(f"{_PARTIAL}{final.name}")
