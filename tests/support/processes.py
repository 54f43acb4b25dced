"""Runs of the command line, and what they leave behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from slime_like.commands.main import main
from tests.support.forked_command import ForkedCommand, worker_server

_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Finished:
    """Result of a command. ``at`` is the monotonic time of its end, before the wait for its remains."""

    code: int
    stdout: str
    stderr: str
    left_behind: list[str]
    at: float


class Command:
    """``slime-like ARGUMENTS`` in a new process group.

    The command and its Ray workers are forked from a process that has imported them, which takes a third of the time.
    With ``forked`` false, they are new interpreters, as a user starts them. A forked one may run another ``program``.

    The context manager ends the command if a test fails. The test process becomes the subreaper of the command's
    orphans, so every descendant is found through the process tree.
    """

    process: ForkedCommand | subprocess.Popen[bytes]

    def __init__(
        self,
        arguments: Sequence[str],
        log_dir: Path,
        forked: bool = True,
        program: Callable[[Sequence[str]], int] = main,
    ) -> None:
        _adopt_orphans(True)
        workers = worker_server() if forked else None  # started before the command, and not counted as left behind
        log_dir.mkdir(parents=True, exist_ok=True)
        self._out, self._err = log_dir / "stdout.txt", log_dir / "stderr.txt"
        self._before = {child.pid for child in psutil.Process().children(recursive=True)}
        self._memory_before = _shared_memory()
        self._sessions_before = _ray_sessions()
        if workers is not None:
            self.process = ForkedCommand(workers, arguments, self._out, self._err, program)
            return
        with self._out.open("w") as out, self._err.open("w") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "slime_like.commands.main", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.finish(timeout_s=0.0)

    @property
    def output(self) -> str:
        return "".join(file.read_text(errors="replace") for file in (self._out, self._err))  # it may be writing

    def interrupt(self, number: signal.Signals = signal.SIGINT) -> None:
        """Send a signal to the whole process group, like Ctrl-C on a terminal."""
        os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """Kill the command, like the kernel's out-of-memory killer."""
        self.process.kill()

    def wait_for(self, text: str, timeout_s: float, count: int = 1) -> None:
        """Wait until standard output and standard error contain ``text`` so many times."""
        deadline = time.monotonic() + timeout_s
        while self.output.count(text) < count:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"never printed {text!r} {self._state()}")
            time.sleep(0.05)

    def wait_for_rows(self, run_dir: Path, count: int = 1, timeout_s: float = 240.0) -> None:
        """Wait until the run's metrics have ``count`` steps."""
        metrics, deadline = run_dir / "metrics.jsonl", time.monotonic() + timeout_s
        while not metrics.is_file() or metrics.read_text().count('train_actor_training/loss"') < count:
            if self.process.poll() is not None or time.monotonic() > deadline:
                logs = {log.name: log.read_text(errors="replace")[-1000:] for log in run_dir.glob("worker_logs/*.log")}
                raise AssertionError(f"never had {count} steps {self._state()}\n{logs}")
            time.sleep(0.02)

    def _state(self) -> str:
        """Return how the command ended, or which processes it still has, and its output."""
        code = self.process.poll()
        state = f"(exit code {code})" if code is not None else f"with {[_title(each) for each in self.descendants()]}"
        return f"{state}:\n{self.output}"

    def descendants(self) -> list[psutil.Process]:
        """Return the living processes that the command started, directly or not."""
        found = []
        for child in psutil.Process().children(recursive=True):
            if child.pid not in self._before and child.pid != self.process.pid and not _is_zombie(child):
                found.append(child)
        return found

    def listening_addresses(self) -> set[str]:
        """Return the addresses at which the command or a descendant accepts TCP connections."""
        found: set[str] = set()
        for process in [psutil.Process(self.process.pid), *self.descendants()]:
            try:
                connections = process.net_connections(kind="tcp")
            except psutil.NoSuchProcess:
                continue
            found |= {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN}
        return found

    def named(self, *titles: str) -> psutil.Process:
        """Return the descendant whose process title contains one of ``titles``."""
        matches = [process for process in self.descendants() if any(title in _title(process) for title in titles)]
        assert matches, f"no descendant is called {titles}: {[_title(p) for p in self.descendants()]}"
        return matches[0]

    def finish(self, timeout_s: float) -> Finished:
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            code = self.process.wait()
        ended = time.monotonic()
        finished = Finished(code, self._out.read_text(), self._err.read_text(), self._left_behind(), ended)
        _adopt_orphans(False)  # other tests expect the system to collect what they orphan
        return finished

    def succeed(self, timeout_s: float) -> Finished:
        """Require exit code 0 and that no process is left behind."""
        finished = self.finish(timeout_s)
        assert finished.code == 0, finished.stdout + finished.stderr
        assert finished.left_behind == []
        return finished

    def _left_behind(self, grace_s: float = 30.0) -> list[str]:
        """Return titles of descendants that are still alive after a grace period, segments of shared memory whose
        maker is gone, and the directory of the Ray session."""
        deadline = time.monotonic() + grace_s
        # Check twice: if a process ends during a check, its children are missed until this process adopts them.
        while (self._is_something_left() or self._is_something_left()) and time.monotonic() < deadline:
            time.sleep(0.1)
        left = self.descendants()
        titles = [_title(process) for process in left]
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        return titles + [str(path) for path in [*self._memory_left(), *self._sessions()]]

    def _is_something_left(self) -> bool:
        return bool(self.descendants() or self._memory_left() or self._sessions())

    def _sessions(self) -> list[Path]:
        """Return directories of Ray's and the engines' files, if the command started a cluster."""
        mine = [path for path in _ray_sessions() if path.name.endswith(f"_{self.process.pid}")]
        return [path for path in mine if path not in self._sessions_before]  # an earlier process had the same id

    def _memory_left(self) -> list[Path]:
        """Return segments of this command, or of a concurrent one that its guard has not removed yet."""
        return [path for path in _shared_memory() - self._memory_before if not _maker_lives(path)]


def _ray_sessions() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("slime-*/r/session_[0-9]*"))


def _shared_memory() -> set[Path]:
    """Return weight buckets in shared memory, ``slime-RUN.PID.NUMBER``."""
    return set(Path("/dev/shm").glob("slime-*.*.*"))


def _maker_lives(bucket: Path) -> bool:
    return psutil.pid_exists(int(bucket.name.split(".")[1]))


def _adopt_orphans(on: bool) -> None:
    """Make the test process the parent of its descendants' orphans, or stop that."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER) failed")


def _is_zombie(process: psutil.Process) -> bool:
    """Return whether a process is a zombie. Adopted zombies are collected here."""
    try:
        if process.status() != psutil.STATUS_ZOMBIE:
            return False
        if process.ppid() == os.getpid():
            os.waitpid(process.pid, os.WNOHANG)
    except (psutil.NoSuchProcess, ChildProcessError):
        pass  # it ended during the check
    return True


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:160] or process.name()
    except psutil.NoSuchProcess:
        return "(ended)"


def run(arguments: Sequence[str], log_dir: Path, timeout_s: float = 180.0, forked: bool = True) -> Finished:
    with Command(arguments, log_dir, forked) as command:
        return command.finish(timeout_s)


def succeed(arguments: Sequence[str], log_dir: Path, timeout_s: float = 180.0, forked: bool = True) -> Finished:
    """Run a command that must succeed and leave no process behind."""
    with Command(arguments, log_dir, forked) as command:
        return command.succeed(timeout_s)
