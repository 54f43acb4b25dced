"""Detection of workers that are stopped (SIGSTOP), not dead. They are reported, then ended, so no run waits for hours.

A stopped process does not answer, and Ray does not consider it dead. A process that computes for a long time, or that a
debugger traces, is not stopped.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import state
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

LOOK_EVERY_S = 15.0
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


class StopWatch:
    """Record of stopped processes, which decides when to report and to end them.

    Attributes:
        ended: processes to be ended, and when that was decided.
    """

    def __init__(self) -> None:
        self._since: dict[Stopped, float] = {}
        self._reported: set[Stopped] = set()
        self.ended: dict[Stopped, float] = {}

    def look(self, found: Collection[Stopped], now: float) -> tuple[list[str], list[Stopped]]:
        """Return sentences to report and processes to end, given the processes found stopped at ``now`` (seconds)."""
        self._since = {one: self._since.get(one, now) for one in found}
        self._reported &= self._since.keys()
        notes, end = [], []
        for one, since in self._since.items():
            if now - since >= END_AFTER_S:
                end.append(one)
                if one not in self.ended:
                    self.ended[one] = now
                    notes.append(f"{one} has been stopped for {now - since:.0f} s, and is ended")
            elif now - since >= REPORT_AFTER_S and one not in self._reported:
                self._reported.add(one)
                left = END_AFTER_S - (now - since)
                notes.append(
                    f"{one} has been stopped (SIGSTOP) for {now - since:.0f} s; it is ended in {left:.0f} s, unless "
                    f"`kill -CONT {one.process}` there resumes it"
                )
        return notes, end

    def recently_ended(self, now: float) -> str | None:
        """Return the process that was ended shortly before ``now``, and why."""
        last = max(self.ended, key=lambda one: self.ended[one], default=None)
        if last is None or now - self.ended[last] > _RECENT_S:
            return None
        return f"{last} had been stopped (SIGSTOP) and was ended"


class StoppedWorkers:
    """Thread that checks the workers of this process's job on all nodes every ``LOOK_EVERY_S`` seconds.

    Args:
        note: called with a sentence, from that thread.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._watch = StopWatch()
        self._over = threading.Event()
        self._asked: dict[str, Any] = {}  # answers that were not there in time, by node
        self._thread = threading.Thread(target=self._run, name="stopped-workers", daemon=True)
        self._thread.start()

    def close(self, wait: bool) -> str | None:
        """End the thread and return the worker that was ended shortly before. ``wait`` needs a Ray that can answer."""
        self._over.set()
        if wait:
            self._thread.join(LOOK_EVERY_S)
        return self._watch.recently_ended(time.monotonic())

    def _run(self) -> None:
        end: list[Stopped] = []
        while not self._over.wait(LOOK_EVERY_S):
            try:
                found = self._find(end)
            except Exception as error:  # Ray can raise any class after losing a daemon, which ends the run elsewhere
                if not self._over.is_set():
                    self._note(f"stopped workers are no longer looked for ({type(error).__name__}: {error})")
                return
            notes, end = self._watch.look(found, time.monotonic())
            for note in notes:
                self._note(note)

    def _find(self, end: Sequence[Stopped]) -> list[Stopped]:
        context = ray.get_runtime_context()
        here, found = context.get_node_id(), list[Stopped]()
        nodes: dict[str, tuple[str, list[int]]] = {}  # address and living actors' processes
        for actor in state.actors(None, ray.JobID.from_hex(context.get_job_id()), "ALIVE").values():
            place = actor["Address"]
            nodes.setdefault(place["NodeID"], (place["IPAddress"], []))[1].append(actor["Pid"])
        for node, (address, workers) in nodes.items():
            if node == here:
                found += stopped_processes(workers, address, end)
            elif node not in self._asked:
                strategy = NodeAffinitySchedulingStrategy(node, soft=False)
                options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": strategy}
                self._asked[node] = ray.remote(stopped_processes).options(**options).remote(workers, address, end)
        asked = {reference: node for node, reference in self._asked.items()}
        ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=LOOK_EVERY_S) if asked else ([], [])
        for reference in ready:
            del self._asked[asked[reference]]
            found += ray.get(reference)
        return found
