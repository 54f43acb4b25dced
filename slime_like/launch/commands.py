"""Options and child processes of a launch, the verdict of a node, and the note that it leaves for other nodes.

Node 0 runs ``slime-like plan``, then ``slime-like train``. All nodes share its verdict. A node that ends before Ray
connects it leaves a note. The nodes that wait for it read the note and end, too. Each node removes its note of an
earlier start. Until then, that note counts only if the node stays away for a while, and only while it is younger than
the wait for nodes.
"""

import json
import math
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from slime_like.errors import FAILED, ConfigError, LaunchError, SlimeLikeError, exit_code
from slime_like.launch.restarts import ENDED, KILLED, how_ended
from slime_like.system.disk import write_private
from slime_like.system.interrupts import raise_if_interrupted
from slime_like.system.processes import child_command

DEFAULT_PORT = 6380
_STOP_S = 10.0
_PREFIX = "slime-like: "
_LINES = 60
_LOOK_EVERY_S = 0.1
_CODE = re.compile(r" \[([\w.-]+)\]$")


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """Options of ``slime-like launch``, whose help describes them. Only ``node_rank`` and ``address`` differ by node.

    Attributes:
        flags: flags of ``slime-like train``, including the cluster's size.
        address: this node's address; "" means the address that routes to ``head``.
        token_file: ``None`` means a file next to the run directory.
    """

    config: Path | None
    flags: tuple[str, ...]
    nodes: int
    node_rank: int
    head: str = ""
    address: str = ""
    port: int = DEFAULT_PORT
    token_file: Path | None = None
    nodes_timeout_s: float = 600.0
    ray_timeout_s: float = 120.0
    silence_s: float = 30.0
    stop_s: float = 60.0
    plan: bool = True

    def __post_init__(self) -> None:
        problems = []
        if self.nodes < 1:
            problems.append(f"--nodes={self.nodes} must be at least 1")
        elif not 0 <= self.node_rank < self.nodes:
            problems.append(f"--node_rank={self.node_rank} must be 0 to {self.nodes - 1}, with --nodes={self.nodes}")
        if self.nodes > 1 and not self.head:
            problems.append(f"--head is missing, with --nodes={self.nodes}; give node 0's address")
        if not 1 <= self.port <= 65_535:  # 0 would mean a different port at every start
            problems.append(f"--port={self.port} must be 1 to 65535")
        for name in ("nodes_timeout_s", "ray_timeout_s", "silence_s", "stop_s"):
            if not 0 < getattr(self, name) < math.inf:
                problems.append(f"--{name}={getattr(self, name):g} must be a number of seconds above 0")
        if problems:
            raise ConfigError(problems, code="option-range")

    def token_path(self, run_dir: Path) -> Path:
        """Return the file of Ray's token."""
        return self.token_file or launch_directory(run_dir) / "key"


def launch_directory(run_dir: Path) -> Path:
    """Return a directory next to the run directory, because that may be renamed."""
    return run_dir.with_name(f".{run_dir.name}.cluster")


@dataclass(frozen=True, slots=True)
class RunVerdict:
    """Exit code of every node, and the cause if it is not 0. ``fault`` is the cause's error code."""

    code: int
    sentence: str = ""
    fault: str = ""


class NodeEndedError(LaunchError):
    """Another node has ended the run. This node ends with the same ``verdict``."""

    code = "node-ended"

    def __init__(self, verdict: RunVerdict) -> None:
        self.verdict = verdict
        super().__init__(verdict.sentence)


class RefusedError(LaunchError):
    """Rejection of this node by a run, which continues without it."""

    code = "rank-refused"


def failure(error: Exception, who: str = "") -> RunVerdict:
    """Return the verdict of a run that ``error`` has ended. ``who`` is the node, if the error doesn't name it."""
    if isinstance(error, NodeEndedError):
        return error.verdict
    if not isinstance(error, SlimeLikeError):
        return RunVerdict(FAILED, f"{who}: {type(error).__name__}: {error}")
    sentence = "; ".join(map(str, error.problems)) if isinstance(error, ConfigError) else str(error)
    return RunVerdict(exit_code(error), f"{who}: {sentence}" if who else sentence, error.code)


class ExitNotes:
    """Note of this node, and notes that the other nodes leave from now on. Removes this node's earlier note."""

    def __init__(self, run_dir: Path, options: LaunchOptions) -> None:
        self._paths = [launch_directory(run_dir) / f"ended-{rank}.json" for rank in range(options.nodes)]
        self._own = self._paths[options.node_rank]
        with suppress(NotADirectoryError):
            self._own.unlink(missing_ok=True)
        self._earlier = [_modified(path) for path in self._paths]
        self._return_at = time.monotonic() + 2 * options.silence_s
        self._patience_s = options.nodes_timeout_s

    def leave(self, verdict: RunVerdict) -> None:
        """Write the note. A failure is reported on standard error, since this node ends in any case."""
        try:
            write_private(self._own, json.dumps(asdict(verdict)))
        except OSError as error:
            why = f"other nodes will not learn why this one has ended: {self._own} cannot be written"
            print(f"[slime-like] {why} ({error.strerror})", file=sys.stderr, flush=True)

    def require_none_ended(self, ranks: Iterable[int] = (0,)) -> None:
        """Check the notes of these nodes.

        Raises ``NodeEndedError`` if a node left a note in this start, or shortly before it and did not return.
        """
        for rank in ranks:
            modified = _modified(self._paths[rank])
            if modified is None:
                continue
            if modified != self._earlier[rank]:
                raise NodeEndedError(self._read(rank))
            age_s = max(0.0, time.time() - modified)
            if age_s < self._patience_s and time.monotonic() > self._return_at:
                note, ago = self._read(rank), f"node {rank} ended {age_s:.0f} s ago and was not restarted"
                raise NodeEndedError(replace(note, sentence=f"{ago}: {note.sentence}"))

    def _read(self, rank: int) -> RunVerdict:
        try:
            return RunVerdict(**json.loads(self._paths[rank].read_text(encoding="utf-8")))
        except (OSError, TypeError, ValueError) as error:
            return RunVerdict(1, f"node {rank} has ended, and {self._paths[rank]} does not say why ({error})")


def _modified(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:  # no note, or no directory yet
        return None


def train_arguments(options: LaunchOptions, cluster: str | None) -> list[str]:
    """Build the arguments of ``train``, which joins the ``cluster`` if one is given."""
    address = ["--cluster.address", cluster] if cluster else []
    return ["train", *([str(options.config)] if options.config else []), *options.flags, *address]


def plan_arguments(options: LaunchOptions, run_dir: Path) -> list[str]:
    """Build the arguments of ``plan`` for the started cluster. The plan is also written to a file."""
    preflight = ["--preflight", "--output", str(_plan_path(run_dir))]
    return ["plan", *([str(options.config)] if options.config else []), *preflight, *options.flags]


def run_plan(options: LaunchOptions, run_dir: Path, environment: Mapping[str, str]) -> RunVerdict:
    """Plan, unless the options say otherwise. If the run does not fit, standard output has all reasons."""
    if not options.plan:
        return RunVerdict(0)
    path = _plan_path(run_dir)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    verdict = run_command(plan_arguments(options, run_dir), environment, options.stop_s)
    if not path.is_file():
        return verdict
    problems = json.loads(path.read_text(encoding="utf-8"))["problems"]
    cause = "; ".join(problems) or "it needs more memory than a GPU has; see its table on node 0"
    return RunVerdict(verdict.code, f"slime-like plan: {cause}", ENDED)


def _plan_path(run_dir: Path) -> Path:
    return launch_directory(run_dir) / "plan.json"


def run_command(
    arguments: list[str], environment: Mapping[str, str], stop_s: float, watch: Callable[[], None] = lambda: None
) -> RunVerdict:
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
    if not code:
        return RunVerdict(code)
    sentence = child.sentence()
    found = _CODE.search(sentence)
    fault = KILLED if code < 0 else found[1] if found else ""
    return RunVerdict(code if code > 0 else FAILED, f"slime-like {arguments[0]}: {sentence}", fault)


class _Child:
    """``slime-like ARGUMENTS`` in a process that ends with this one. Its standard error is passed on."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self._lines: deque[str] = deque(maxlen=_LINES)
        self._process = subprocess.Popen(
            child_command(arguments),
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
            return f"it {how_ended(self._process.returncode)}; its output there has the cause"
        first = lines[starts[-1]].removeprefix(_PREFIX)
        listed = [line.removeprefix("  - ") for line in lines[starts[-1] + 1 :] if line.startswith("  - ")]
        return "; ".join(listed) or first

    def _copy(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._lines.append(line.decode(errors="replace").rstrip("\n"))
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()
