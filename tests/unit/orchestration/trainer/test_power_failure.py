"""Power failures during a save. Unsynced writes are lost, cut or reordered, and the last checkpoint must be found.

The production code runs on real files. Its system calls are recorded, and the power fails at a random one. Then the
directory is rebuilt like a disk may have kept it: all synced names and contents, and any subset of the others.
"""

import contextlib
import io
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from slime_like.errors import CheckpointError, ConfigError
from slime_like.orchestration.trainer.checkpoint import Checkpoint, CheckpointStore, newest_whole
from slime_like.orchestration.trainer.model_ranks import ModelRanks
from tests.support.pending import OneRank


class PowerFailure(BaseException):
    """Raised by every system call after the failure."""


class Node:
    """A file, directory or link, with its durable content and a directory's pending changes of names."""

    def __init__(self, target: str | None = None, *, directory: bool = False) -> None:
        self.target = target
        self.directory = directory
        self.content: bytes | None = None  # of a synced file
        self.now: dict[str, Node] = {}
        self.durable: dict[str, Node] = {}
        self.pending: list[Callable[[dict[str, Node]], object]] = []

    def change(self, apply: Callable[[dict[str, "Node"]], object]) -> None:
        apply(self.now)
        self.pending.append(apply)

    def sync(self, path: Path) -> None:
        if not self.directory:
            self.content = path.read_bytes()
            return
        self.durable = dict(self.now)
        self.pending = []


class Disk:
    """Model of everything below ``root``, and the calls that change it."""

    def __init__(self, root: Path, chance: random.Random, skipped: str | None) -> None:
        self.root, self.chance, self.skipped = root, chance, skipped
        self.tree = Node(directory=True)
        self.left: int | None = None
        self.synced: Counter[str] = Counter()
        self.labels: set[str] = set()

    def begin(self, calls: int | None) -> None:
        """Let the power fail after this many ``calls``, and reset the counts of syncs."""
        self.left, self.synced = calls, Counter()

    def _node(self, path: Path) -> Node:
        node = self.tree
        for part in path.relative_to(self.root).parts:
            node = node.now[part]
        return node

    def _step(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise PowerFailure

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("mkdir", "rmdir", "unlink", "symlink", "rename", "replace", "fsync"):
                patch.setattr(os, name, getattr(self, f"_{name}")(getattr(os, name)))
            patch.setattr(io, "open", self._open(io.open))
            yield

    def _open(self, real: Any) -> Any:
        def opened(path: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
            if "w" in mode and isinstance(path, Path) and path.is_relative_to(self.root):
                self._step()
                parent = self._node(path.parent)
                if path.name in parent.now:
                    parent.now[path.name].content = None  # overwritten
                else:
                    file = Node()
                    parent.change(lambda names: names.update({path.name: file}))
            return real(path, mode, *arguments, **named)

        return opened

    def _entered(self, real: Any, make: Callable[..., tuple[Any, Node | None]]) -> Any:
        """Wrap a call that adds or removes a name."""

        def called(*arguments: Any, dir_fd: int | None = None, **named: Any) -> Any:
            self._step()
            path, node = make(*arguments)
            place = Path(path) if dir_fd is None else Path(f"/proc/self/fd/{dir_fd}").readlink() / path
            result = real(*arguments, **({} if dir_fd is None else {"dir_fd": dir_fd}))
            parent, name = self._node(place.parent), place.name
            parent.change(lambda names: names.pop(name, None) if node is None else names.update({name: node}))
            return result

        return called

    def _mkdir(self, real: Any) -> Any:
        return self._entered(real, lambda path, *_: (path, Node(directory=True)))

    def _symlink(self, real: Any) -> Any:
        return self._entered(real, lambda target, path, *_: (path, Node(str(target))))

    def _unlink(self, real: Any) -> Any:
        return self._entered(real, lambda path: (path, None))

    _rmdir = _unlink

    def _rename(self, real: Any) -> Any:
        def renamed(old: Path, new: Path) -> None:
            self._step()
            node = self._node(Path(old))
            real(old, new)
            assert Path(old).parent == Path(new).parent
            source, target = Path(old).name, Path(new).name

            def apply(names: dict[str, Node]) -> None:
                names.pop(source, None)
                names[target] = node

            self._node(Path(old).parent).change(apply)

        return renamed

    _replace = _rename

    def _fsync(self, real: Any) -> Any:
        def synced(handle: int) -> None:
            self._step()
            path = Path(f"/proc/self/fd/{handle}").readlink()
            kind = path.parent.name if path.parent.name == "trainer" else ""
            name = "partial" if path.name.startswith(".partial") else f"{kind}/{path.name}"
            self.synced[name] += 1
            label = f"{name} {self.synced[name]}"
            self.labels.add(label)
            if label != self.skipped:
                self._node(path).sync(path)

        return synced

    def after_failure(self, root: Path) -> None:
        """Write to ``root`` what the disk may have kept."""
        self._keep(self.tree, self.root, root)

    def _keep(self, node: Node, was: Path, place: Path) -> None:
        if node.target is not None:
            place.symlink_to(node.target)
        elif not node.directory:
            written = b"never synced, and longer than nothing"
            damaged = (b"", bytes(len(written)), written[:9])
            place.write_bytes(self.chance.choice(damaged) if node.content is None else node.content)
        else:
            place.mkdir()
            names = dict(node.durable)
            for change in node.pending:
                if self.chance.random() < 0.5:
                    change(names)
            for name, entry in names.items():
                self._keep(entry, was / name, place / name)


class Trainers(OneRank):
    """Trainers that write the save's number to two files in different directories."""

    number = 0

    def save(self, directory: Path) -> None:
        (directory / "deeper").mkdir(parents=True)
        for file in (directory / "weights", directory / "deeper" / "more"):
            file.write_text(f"{self.number:08}")


def _learn(disk: Disk, node: Node, place: Path) -> None:
    """Mark everything on the real disk as durable."""
    for path in place.iterdir():
        if path.is_symlink():
            entry = Node(str(path.readlink()))
        else:
            entry = Node(directory=path.is_dir())
            if entry.directory:
                _learn(disk, entry, path)
            else:
                entry.content = path.read_bytes()
        node.now[path.name] = node.durable[path.name] = entry


SYNCS = (
    *("/checkpoints 1", "/checkpoints 2", "/checkpoints 3", "/ledger 1", "/more 1", "/run 1", "/runs 1"),
    *("/state.json 1", "/trainer 1", "partial 1", "trainer/deeper 1", "trainer/weights 1"),
)
"""Syncs of one save, each with the number of the call."""


def _saves(base: Path, count: int, seed: int, skipped: str | None = None) -> set[str]:
    """Save ``count`` times, with a power failure in or after each save. Return the syncs.

    Raises:
        AssertionError: a failure did not leave a whole checkpoint of the last or the current save.
    """
    chance, labels = random.Random(seed), set[str]()
    completed, step, root = 0, 0, base
    for number in range(count):
        if number % 10 == 0:  # a new run
            completed, step, root = -1, 0, base / f"run-{number}"
            (root / "runs").mkdir(parents=True)
        disk = Disk(root, chance, skipped)
        _learn(disk, disk.tree, root)
        run_dir = root / "runs" / "run"
        trainers = Trainers()
        trainers.number = number
        disk.begin(chance.choice((None, *range(60))))
        finished = False
        step += 1 if not step or chance.random() < 0.6 else 0
        with disk.recording(), contextlib.suppress(PowerFailure):
            if not run_dir.exists():
                run_dir.mkdir()
            newest_whole(run_dir)
            store = CheckpointStore(run_dir, 1 + number // 10 % 2, [cast("ModelRanks", trainers)], _no_note)
            store.written["ledger"] = lambda path: path.write_text("events")
            disk.synced, disk.labels = Counter(), set()  # ignore syncs of the start
            store.save(step, {"number": number})
            finished = True
            completed = number
        root = base / f"after-{number}"
        disk.after_failure(root)
        labels |= disk.labels
        found = newest_whole(root / "runs" / run_dir.name)
        for path in (root / "runs" / "run" / "checkpoints").glob("step-*"):
            Checkpoint.read(path).require_whole()  # even one whose removal has started
        if completed >= 0:
            assert found is not None and not found.passed_over, "the last checkpoint is gone, or latest leads nowhere"
        if found is not None:
            assert not found.passed_over
            assert found.state["number"] in ({number} if finished else {completed, number})
            for name in ("weights", "deeper/more"):
                assert (found.model("trainer") / name).read_text() == f"{found.state['number']:08}"
            completed, step = found.state["number"], found.step
    return labels


def _no_note(note: str) -> None:
    raise AssertionError(note)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.acceptance) for seed in (1, 2))])
def test_a_hundred_power_failures_leave_the_last_checkpoint(tmp_path: Path, seed: int) -> None:
    assert _saves(tmp_path, 100, seed) == set(SYNCS)


@pytest.mark.parametrize("sync", SYNCS)
def test_every_sync_is_needed(tmp_path: Path, sync: str) -> None:
    with pytest.raises((AssertionError, CheckpointError, ConfigError, OSError)):
        for seed in range(6, 26):  # the rarest fault shows within a few saves of the first seed
            _saves(tmp_path / str(seed), 100, seed, skipped=sync)
