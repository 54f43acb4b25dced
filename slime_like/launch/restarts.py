"""``--restarts``: a small parent process that starts a run again after a death, from its newest whole checkpoint.

A parent imports neither torch nor Ray, and ends its child with itself. With ``launch``, each node has one. All children
end with the same verdict, so all parents decide alike.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from slime_like.errors import DONE, FAILED, HEALTH_STOP, INTERRUPTED, LIKELY_KILLER, OUTPUT_CLOSED, REFUSED
from slime_like.observability.metrics import METRICS_FILE, RESTARTS_FILE
from slime_like.observability.names import LOSS
from slime_like.system.disk import end_of_file, write_private
from slime_like.system.interrupts import take_interrupt
from slime_like.system.processes import child_command

CAUSE_FILE = "failure.json"
CAUSE_VARIABLE = "SLIME_LIKE_CAUSE_FILE"
"""Variable of a child's environment with the file for the cause of its failure."""

KILLED, ENDED = "killed", "restarts-ended"
NEVER = (DONE, REFUSED, INTERRUPTED, OUTPUT_CLOSED)
"""Exit codes after which a run is not started again."""

MACHINE = frozenset({
    KILLED, "worker-died", "worker-stopped", "worker-hung", "node-out-of-memory", "no-answer", "node-lost",
    "node-missing", "head-silent", "ray-died", "ray-ended", "ray-not-started", "cluster-silent", "devices-busy",
    "too-few-devices", "port-taken", "no-rendezvous", "engine-died", "engine-part-ended", "engine-not-running",
    "engine-start-timeout", "engine-timeout", "engines-silent", "disconnected", "receiver-lost", "sender-lost",
    "shared-memory-full", "disk-refused", "write-refused", "directory-refuses", "directory-refused", "ledger-locked",
})  # fmt: skip
"""Codes of causes that a machine or a network has. All others are in the code or the data, and happen again."""

_FRUITLESS = 3
_FIRST_WAIT_S, _LONGEST_WAIT_S = 5.0, 300.0
_STOP_S = 60.0
_LOG_BYTES = 2**16


def leave_cause(code: str, sentence: str, who: str = "", phase: str = "") -> None:
    """Write the cause of this process's failure for its parent, if that restarts it."""
    if path := os.environ.get(CAUSE_VARIABLE):
        with suppress(OSError):  # the disk may be full; without a cause, the parent blames the machine
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            cause = {"code": code, "who": who, "phase": phase, "sentence": sentence}
            write_private(Path(path), json.dumps(cause) + "\n")


def is_restarted() -> bool:
    """Return whether a parent restarts this process."""
    return CAUSE_VARIABLE in os.environ


@dataclass(frozen=True, slots=True)
class Death:
    """End of a start. ``step`` is the step under way: the one after the last trained step, or after the checkpoint."""

    step: int
    code: str
    sentence: str


@dataclass
class Restarts:
    """Restarts of a run in ``run_dir``.

    Args:
        arguments, again: arguments of the first child, and of later ones. More flags may follow.
        resume: ``resume`` of the configuration. A restart resumes from a checkpoint of this run, if it made one.
        limit: number of restarts; -1 for any number.
        rank: this node's number. Node 0 keeps the record.
        command: makes the command of a child.
        first_wait_s: seconds before a restart. They double with each start that makes no checkpoint.
        on_end: called with a sentence when a failed run is given up.
    """

    run_dir: Path
    arguments: Sequence[str]
    resume: str
    limit: int
    again: Sequence[str] | None = None
    rank: int = 0
    command: Callable[[Sequence[str]], list[str]] = child_command
    first_wait_s: float = _FIRST_WAIT_S
    on_end: Callable[[str], None] = lambda _: None
    _rows: list[Mapping[str, Any]] = field(default_factory=list)

    def run(self) -> int:
        """Start the run until it is done, rejected, interrupted, or given up. Return the exit code of its last start.

        Raises ``KeyboardInterrupt`` after the child has ended. It has ``_STOP_S`` seconds before it is killed.
        """
        foreign = frozenset() if self.resume == "auto" else _checkpoints(self.run_dir)
        deaths, number, fruitless = dict[int, Death](), 0, 0
        while True:
            before, offset = _checkpoints(self.run_dir), _size(self.run_dir / METRICS_FILE)
            flags = ["--resume", "auto"] if self.resume != "auto" and before - foreign else []
            code, cause = self._start([*((number and self.again) or self.arguments), *flags])
            if code in NEVER:
                self._write()
                return code
            own = _checkpoints(self.run_dir) - foreign
            resumes_from = newest_step(self.run_dir) if own else 0
            death = Death((_last_trained(self.run_dir, offset) or resumes_from) + 1, cause["code"], cause["sentence"])
            deaths = {step: each for step, each in deaths.items() if step >= death.step}  # it has passed the others
            fruitless = 0 if _checkpoints(self.run_dir) - before else fruitless + 1
            if end := self._reason_to_end(death, deaths.get(death.step), number, fruitless):
                self._write()
                self._say(end)
                self.on_end(end)
                return code if code > 0 else FAILED
            if death.code not in MACHINE:
                deaths[death.step] = death
            number, wait_s = number + 1, min(_LONGEST_WAIT_S, self.first_wait_s * 2**fruitless)
            self._record(number, resumes_from, death, code, wait_s)
            self._say(f"restart {number} in {wait_s:g} s, after a failure at step {death.step}: {death.sentence}")
            time.sleep(wait_s)

    def _reason_to_end(self, death: Death, earlier: Death | None, restarts: int, fruitless: int) -> str | None:
        """Return why the run is not started again, or ``None``. ``earlier``: a cause of no machine at the same step."""
        last = f"the last failure: {death.sentence}"
        if death.code in (ENDED, HEALTH_STOP):
            return death.sentence
        if earlier is not None and death.code not in MACHINE:
            causes = f"first: {earlier.sentence}; then: {death.sentence}"
            return f"not restarted: step {death.step} failed twice, and not because of a machine; {causes}"
        if fruitless == _FRUITLESS:
            return f"not restarted: {fruitless} starts in a row made no checkpoint (checkpoint.every); {last}"
        if restarts == self.limit:
            return f"not restarted: all {restarts} restarts (--restarts) are used up; {last}"
        return None

    def _start(self, arguments: Sequence[str]) -> tuple[int, dict[str, str]]:
        """Run a child to its end. Return its exit code, negative for a signal, and the cause of a failure."""
        path = self.run_dir / (f"failure-{self.rank}.json" if self.rank else CAUSE_FILE)
        path.unlink(missing_ok=True)
        # A separate session: a signal of the terminal reaches the child only through this process.
        child = subprocess.Popen(
            self.command(arguments),
            stdin=subprocess.DEVNULL,
            env={**os.environ, CAUSE_VARIABLE: str(path)},
            start_new_session=True,
        )
        try:
            code = child.wait()
        except KeyboardInterrupt:
            take_interrupt()
            child.send_signal(signal.SIGINT)
            try:
                with suppress(subprocess.TimeoutExpired):
                    child.wait(_STOP_S)
            finally:  # also after a second interrupt
                child.kill()
                child.wait()
            raise
        try:
            return code, json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return code, {"code": KILLED, "sentence": f"the process of the run {how_ended(code)}"}

    def _record(self, number: int, resumes_from: int, death: Death, code: int, wait_s: float) -> None:
        row = {"time": time.time(), "restart": number, "resumed_from": resumes_from, "wait_s": wait_s}
        self._rows.append({**row, "exit_code": code, **asdict(death)})
        self._write(new=1)

    def _write(self, new: int = 0) -> None:
        """Append the last ``new`` rows to the run's file, or all rows if the directory has been moved aside."""
        path = self.run_dir / RESTARTS_FILE
        if self._rows and self.rank == 0 and self.run_dir.is_dir():
            try:
                with path.open("a", encoding="utf-8") as file:
                    rows = self._rows[len(self._rows) - new :] if file.tell() else self._rows
                    file.writelines(json.dumps(row) + "\n" for row in rows)
            except OSError as error:  # a full disk must not end the parent, too
                self._say(f"{path} could not be written ({error.strerror})")

    def _say(self, text: str) -> None:
        print(f"slime-like: {text}", file=sys.stderr, flush=True)


def how_ended(code: int) -> str:
    """Describe the end of a process without an error message, by its return code in Python's form."""
    if code >= 0:
        return f"ended with exit code {code} and without a message"
    return f"was ended by {signal.Signals(-code).name}" + (f"; {LIKELY_KILLER}" if -code == signal.SIGKILL else "")


def newest_step(run_dir: Path) -> int:
    """Return the step of the checkpoint that a restart finds first, or 0."""
    with suppress(OSError, ValueError):
        return _step(run_dir / "checkpoints" / (run_dir / "checkpoints" / "latest").readlink().name)
    return max((_step(path) for path in (run_dir / "checkpoints").glob("step-*")), default=0)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def _checkpoints(run_dir: Path) -> frozenset[tuple[str, int, int]]:
    """Return an identity of each checkpoint. One that is saved again has another."""
    found = set()
    for path in (run_dir / "checkpoints").glob("step-*"):
        with suppress(OSError):  # it is removed just now
            found.add((path.name, path.stat().st_ino, path.stat().st_mtime_ns))
    return frozenset(found)


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _last_trained(run_dir: Path, offset: int) -> int:
    """Return the last step in the metrics after ``offset`` bytes, or 0. A shorter file is of another run."""
    path = run_dir / METRICS_FILE
    new = _size(path) - offset if _size(path) >= offset else _size(path)
    for line in reversed(end_of_file(path, min(new, _LOG_BYTES)).splitlines() if new else []):
        with suppress(ValueError):  # a line that is cut off
            if LOSS in (row := json.loads(line)):
                return int(row["step"])
    return 0
