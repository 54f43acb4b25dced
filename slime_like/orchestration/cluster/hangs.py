"""Decisions about workers that hang: reported after a minute, ended after a bound that their own history gives.

A worker hangs if it makes no progress in a phase (a collective that waits for a lost peer, a full disk's driver), or if
it shows no sign of life (frozen, in a system call that holds the interpreter, or in a loop of its event loop).
"""

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import psutil

from slime_like.orchestration.cluster.node import HEARTBEATS
from slime_like.orchestration.cluster.stopped import Ending, Stopped
from slime_like.system.heartbeat import Pulse

REPORT_AFTER_S = 60.0
FROZEN_S = 120.0
"""Bound for a worker that shows no sign of life and gets no processor time. Even a process that swaps gets some."""
DEAF_S = 600.0
"""Bound for a worker that computes, but shows no sign of life."""
TIMES_USUAL = 10.0
"""Bound for a phase, relative to the usual longest wait for progress in it."""


@dataclass(frozen=True, slots=True)
class WorkerPulse:
    """A worker and its heartbeat, in which its children's progress counts; its processes in state D (frozen, or in a
    system call), and the processor time of its own process."""

    worker: Stopped
    pulse: Pulse
    blocked: tuple[int, ...]
    cpu_s: float


def worker_pulse(process_id: int, node: str) -> WorkerPulse | None:
    """Return the state of a worker on this host; ``None`` if it has no heartbeat, was stopped, or is being traced."""
    with suppress(psutil.NoSuchProcess, OSError):
        process = psutil.Process(process_id)
        log = Path(f"/proc/{process_id}/fd/1").readlink()  # as ``node.use_log`` names it
        beats, family = log.parent.with_name(HEARTBEATS), [process, *process.children(recursive=True)]
        states = {each.pid: _status(each) for each in family}
        pulse = Pulse.read(beats, process_id)
        if pulse is None or {psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP} & set(states.values()):
            return None
        children = (Pulse.read(beats, each) for each in list(states)[1:])
        still_s = min(pulse.still_s, *(each.still_s for each in children if each), math.inf)
        cpu, worker = process.cpu_times(), Stopped(node, process_id, process.create_time(), log.stem)
        blocked = tuple(each for each, state in states.items() if state == psutil.STATUS_DISK_SLEEP)
        return WorkerPulse(worker, replace(pulse, still_s=still_s), blocked, cpu.user + cpu.system)
    return None


def _status(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess):  # a child that ends
        return str(process.status())
    return psutil.STATUS_DEAD


def kill_family(worker: Stopped) -> None:
    """Kill a worker and its descendants, which outlive one in state D. Call on its node."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(worker.process)
        family = [*process.children(recursive=True), process] if process.create_time() == worker.started else []
        for each in family:
            with suppress(psutil.NoSuchProcess):
                each.kill()


@dataclass(frozen=True, slots=True)
class Hang:
    """A worker without progress or sign of life for ``seconds``, which is ended after ``bound_s`` (maybe infinite)."""

    seen: WorkerPulse
    seconds: float
    bound_s: float
    what: str

    def __str__(self) -> str:
        blocked = f" (in state D: {', '.join(map(str, self.seen.blocked))})" if self.seen.blocked else ""
        return f"{self.seen.worker} {self.what} for {self.seconds:.0f} s{blocked}"


class HangWatch:
    """Record of hangs, which decides when to report and to end them.

    Args:
        at_least_s: shortest bound for a phase.

    Attributes:
        ended: workers to be ended.
    """

    def __init__(self, at_least_s: float) -> None:
        self._at_least_s = at_least_s
        self._reported: set[tuple[Stopped, str]] = set()
        self._usual: dict[tuple[str, str], float] = {}
        self._ran: dict[Stopped, tuple[float, float]] = {}  # processor time, and when it last grew
        self._last_end = -math.inf
        self.ended: dict[Stopped, Ending] = {}

    def look(self, found: Iterable[WorkerPulse], now: float) -> tuple[list[str], list[Stopped]]:
        """Return sentences to report and workers to end, given what was seen at ``now`` (seconds)."""
        hangs = [hang for seen in found if (hang := self._hang(seen, now)).seconds >= REPORT_AFTER_S]
        new = [hang for hang in hangs if (hang.seen.worker, hang.what) not in self._reported]
        self._reported = {(hang.seen.worker, hang.what) for hang in hangs}
        notes, end = [_report(group) for group in _by_kind(new)], list[Hang]()
        left = [hang for hang in hangs if hang.seen.worker in self.ended]  # the kill has not arrived
        for group in _by_kind(hang for hang in hangs if hang not in left):
            if any(min(hang.seconds, now - self._last_end) >= hang.bound_s for hang in group):
                end += _furthest_behind(group)
        if end:
            self._last_end = now  # others may have waited for these, so they get their whole bound again
        for hang in end:
            self.ended[hang.seen.worker] = Ending(hang.seen.worker, now, f"{hang}, and was ended", "worker-hung")
            notes.append(f"{hang}, and is ended")
        return notes, [hang.seen.worker for hang in (*left, *end)]

    def _hang(self, seen: WorkerPulse, now: float) -> Hang:
        """Return how long the worker has hung, maybe 0 s. Of two ways, the one whose bound is nearer counts."""
        pulse, worker = seen.pulse, seen.worker
        cpu_s, since = self._ran.get(worker, (-1.0, now))
        self._ran[worker] = (seen.cpu_s, now if seen.cpu_s != cpu_s else since)
        place = (worker.kind, pulse.phase)
        if pulse.usual_s:
            self._usual[place] = pulse.usual_s
        bound_s = max(self._at_least_s, TIMES_USUAL * self._usual[place]) if place in self._usual else math.inf
        is_usual = not pulse.phase or pulse.still_s < 2 * self._usual.get(place, 0.0)
        still = Hang(seen, 0.0 if is_usual else pulse.still_s, bound_s, f"has made no progress in {pulse.phase}")
        is_idle = now - self._ran[worker][1] >= REPORT_AFTER_S / 2
        bound_s = min(FROZEN_S, self._at_least_s) if is_idle else DEAF_S
        silent = Hang(seen, pulse.silent_s, bound_s, "has shown no sign of life")
        ways = [hang for hang in (still, silent) if hang.seconds >= REPORT_AFTER_S]
        return min(ways, key=lambda hang: hang.bound_s - hang.seconds, default=still)


def _report(group: Sequence[Hang]) -> str:
    first, *others = sorted(group, key=lambda hang: (not hang.seen.blocked, hang.seen.pulse.count))
    behind = "" if len(_furthest_behind(group)) == len(group) else ", but it is the furthest behind"
    more = f" ({len(others)} more of its kind hang there, too{behind})" if others else ""
    if math.isinf(first.bound_s):
        return f"{first}{more}; it is not known yet how long this takes, so only its time limit ends it"
    return f"{first}{more}; it is ended after {first.bound_s:.0f} s"


def _furthest_behind(hangs: Sequence[Hang]) -> list[Hang]:
    """Return the hangs that others may wait for: blocked processes, else those with the least progress."""
    blocked = [hang for hang in hangs if hang.seen.blocked]
    least = min(hang.seen.pulse.count for hang in hangs)
    return blocked or [hang for hang in hangs if hang.seen.pulse.count == least]


def _by_kind(hangs: Iterable[Hang]) -> list[list[Hang]]:
    """Group ranks of a kind that hang in the same way. Only their counts can be compared. Engines have none."""

    def key(hang: Hang) -> tuple[str, str]:
        worker = hang.seen.worker
        return worker.role if worker.kind == "engine" else worker.kind, hang.what

    return [list(group) for _, group in groupby(sorted(hangs, key=key), key)]
