"""Detection of workers that are stopped (SIGSTOP), not dead. They are reported, then ended, so no run waits for hours.

A stopped process does not answer, and Ray does not consider it dead. A process that computes for a long time, or that a
debugger traces, is not stopped.
"""

import os
import re
import signal
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

REPORT_AFTER_S = 30.0
END_AFTER_S = 75.0
"""Seconds since a process was first seen stopped. With one more check on either side, the report comes within 60 s and
the end within 120 s."""

_RECENT_S = 60.0
"""Time within which a failure is attributed to an ended worker."""


@dataclass(frozen=True, slots=True)
class Stopped:
    """A stopped process of a worker.

    Attributes:
        node: address of the node.
        process: process id on the node.
        started: start time in seconds since the epoch, since ids are reused.
        role: name of the worker's log, e.g. "trainer-0".
    """

    node: str
    process: int
    started: float
    role: str

    @property
    def kind(self) -> str:
        """Kind of worker, as messages name it: "trainer", "engine"."""
        return self.role.partition("-")[0]

    def is_named_in(self, failure: str) -> bool:
        """Return whether a message is about this worker, or about a rank of its model, which fails with its peers."""
        kind, _, number = self.role.partition("-")
        which = re.escape(re.split(r"[.-]", number)[0]) if kind == "engine" else r"\d+"
        return re.search(rf"\b{re.escape(kind)} (worker |rank )?{which}\b", failure) is not None

    def __str__(self) -> str:
        return f"process {self.process} of {self.role} on {self.node}"

    def kill(self) -> None:
        """Kill the process. Call on its node."""
        with suppress(ProcessLookupError):
            os.kill(self.process, signal.SIGKILL)


def stopped_processes(workers: Collection[int], node: str, end: Collection[Stopped] = ()) -> list[Stopped]:
    """Return the stopped processes among these workers and their descendants on this node; kill those in ``end``."""
    found = []
    for worker in workers:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(worker)
            family = [process, *process.children(recursive=True)]
            found += [stopped for each in family if (stopped := stopped_process(each, node))]
    for stopped in found:
        if stopped in end:
            stopped.kill()
    return found


def stopped_process(process: psutil.Process, node: str, role: str | None = None) -> Stopped | None:
    """Return the process if it is stopped; by default, its role is the name of its log."""
    with suppress(psutil.NoSuchProcess):
        if process.status() == psutil.STATUS_STOPPED:
            named = role or "a worker"
            with suppress(OSError):
                named = role or Path(f"/proc/{process.pid}/fd/1").readlink().stem  # as ``node.use_log`` names it
            return Stopped(node, process.pid, process.create_time(), named)
    return None


@dataclass(frozen=True, slots=True)
class Ending:
    """End of a worker, decided at ``at`` (seconds).

    Attributes:
        reason: a sentence that names the worker.
        code: code of the error that it causes.
    """

    worker: Stopped
    at: float
    reason: str
    code: str = "worker-stopped"


def recently_ended(endings: Collection[Ending], now: float, failure: str | None = None) -> Ending | None:
    """Return the last end shortly before ``now``; with a ``failure``, of a worker that it is about."""
    recent = [each for each in endings if now - each.at <= _RECENT_S]
    about = [each for each in recent if failure is None or each.worker.is_named_in(failure)]
    return max(about, key=lambda each: each.at, default=None)


class StopWatch:
    """Record of stopped processes, which decides when to report and to end them.

    Attributes:
        ended: processes to be ended.
    """

    def __init__(self) -> None:
        self._since: dict[Stopped, float] = {}
        self._reported: set[Stopped] = set()
        self.ended: dict[Stopped, Ending] = {}

    def look(self, found: Collection[Stopped], now: float) -> tuple[list[str], list[Stopped]]:
        """Return sentences to report and processes to end, given the processes found stopped at ``now`` (seconds)."""
        self._since = {one: self._since.get(one, now) for one in found}
        self._reported &= self._since.keys()
        notes, end = [], []
        for one, since in self._since.items():
            if now - since >= END_AFTER_S:
                end.append(one)
                if one not in self.ended:
                    self.ended[one] = Ending(one, now, f"{one} had been stopped (SIGSTOP) and was ended")
                    notes.append(f"{one} has been stopped for {now - since:.0f} s, and is ended")
            elif now - since >= REPORT_AFTER_S and one not in self._reported:
                self._reported.add(one)
                left = END_AFTER_S - (now - since)
                notes.append(
                    f"{one} has been stopped (SIGSTOP) for {now - since:.0f} s; it is ended in {left:.0f} s, unless "
                    f"`kill -CONT {one.process}` there resumes it"
                )
        return notes, end
