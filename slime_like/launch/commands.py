"""Commands that a launch runs as child processes: ``slime-like plan`` on node 0, then ``slime-like train``."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from slime_like.config.launch import LaunchOptions, launch_directory
from slime_like.errors import FAILED, LaunchError
from slime_like.launch.exit import Verdict
from slime_like.system.interrupts import raise_if_interrupted

_STOP_S = 10.0
_PREFIX = "slime-like: "
_LINES = 60
_LOOK_EVERY_S = 0.1


def train_arguments(options: LaunchOptions, cluster: str | None) -> list[str]:
    """Build the arguments of ``train``, which joins the ``cluster`` if one is given."""
    address = ["--cluster.address", cluster] if cluster else []
    return ["train", *([str(options.config)] if options.config else []), *options.flags, *address]


def plan_arguments(options: LaunchOptions, run_dir: Path) -> list[str]:
    """Build the arguments of ``plan`` for the started cluster. The plan is also written to a file."""
    preflight = ["--preflight", "--output", str(_plan_path(run_dir))]
    return ["plan", *([str(options.config)] if options.config else []), *preflight, *options.flags]


def run_plan(options: LaunchOptions, run_dir: Path, environment: Mapping[str, str]) -> Verdict:
    """Plan, unless the options say otherwise. If the run does not fit, standard output has all reasons."""
    if not options.plan:
        return Verdict(0)
    path = _plan_path(run_dir)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    verdict = run_command(plan_arguments(options, run_dir), environment, options.stop_s)
    return Verdict(verdict.code, f"slime-like plan: {why_it_does_not_fit(path)}") if path.is_file() else verdict


def why_it_does_not_fit(output: Path) -> str:
    """Return the problems of a plan that was written to ``output``, as one sentence."""
    problems = json.loads(output.read_text(encoding="utf-8"))["problems"]
    return "; ".join(problems) or "it needs more memory than a GPU has; see its table on node 0"


def _plan_path(run_dir: Path) -> Path:
    return launch_directory(run_dir) / "plan.json"


def run_command(
    arguments: list[str], environment: Mapping[str, str], stop_s: float, watch: Callable[[], None] = lambda: None
) -> Verdict:
    """Run ``slime-like ARGUMENTS`` to its end. ``watch`` is called while waiting, and its errors end the command.

    After an interrupt, the command has ``stop_s`` seconds to stop before it is killed.
    """
    child = _Child(arguments, environment)
    try:
        code = child.wait(watch)
    except LaunchError:
        stop_s = _STOP_S  # a part of the run is gone, so it cannot stop in good order
        raise
    finally:
        child.stop(stop_s)
    return Verdict(code if code >= 0 else FAILED, f"slime-like {arguments[0]}: {child.sentence()}" if code else "")


class _Child:
    """``slime-like ARGUMENTS`` in a process that ends with this one. Its standard error is passed on."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "slime_like.commands.child_main", str(os.getpid()), *arguments],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=dict(environment),
            start_new_session=True,  # Ctrl-C on the terminal reaches it only through this process
        )
        self._pump = threading.Thread(target=self._copy, name="stderr", daemon=True)
        self._pump.start()

    def wait(self, watch: Callable[[], None]) -> int:
        while (code := self._process.poll()) is None:
            raise_if_interrupted()
            watch()
            time.sleep(_LOOK_EVERY_S)
        return code

    def stop(self, within_s: float) -> None:
        """Interrupt the command like Ctrl-C does, and kill it after ``within_s`` seconds."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)  # for SIGTERM, Ray prints a stack trace
            try:
                self._process.wait(within_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()
        self._pump.join(_STOP_S)

    def sentence(self) -> str:
        """Return the command's final message without the prefix. Several problems are joined."""
        lines = list(self._lines)
        starts = [index for index, line in enumerate(lines) if line.startswith(_PREFIX)]
        if not starts:
            return f"it ended with exit code {self._process.returncode}; its output there has the cause"
        first = lines[starts[-1]].removeprefix(_PREFIX)
        listed = [line.removeprefix("  - ") for line in lines[starts[-1] + 1 :] if line.startswith("  - ")]
        return "; ".join(listed) or first

    def _copy(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._lines.append(line.decode(errors="replace").rstrip("\n"))
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()
