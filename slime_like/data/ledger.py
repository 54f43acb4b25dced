"""Ledger: what became of every prompt group of a run, as events in SQLite.

Events are only ever added. So the ledger can be audited: that a group was trained once is something its events show,
not something a column was set to. A checkpoint holds a copy; going on from it brings the copy back, and with it the
truth that whatever happened since has to happen again.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from slime_like.errors import DataError

FILE_NAME = "ledger.sqlite"

ISSUED, REISSUED, GENERATED, SCORED, TRAINED, DROPPED = (
    "issued", "reissued", "generated", "scored", "trained", "dropped",
)  # fmt: skip
STATES = (ISSUED, REISSUED, GENERATED, SCORED, TRAINED, DROPPED)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS events (
    number INTEGER PRIMARY KEY,
    group_id INTEGER NOT NULL,
    state TEXT NOT NULL,
    version INTEGER,
    step INTEGER,
    reason TEXT,
    at REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS events_of_group ON events (group_id, number);
"""
_BUSY_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Audit:
    """Summary of a run's events.

    Attributes:
        issued: groups that were ever issued.
        trained: groups that were trained.
        dropped: groups that were dropped, by reason.
        in_flight: groups that are neither.
        problems: everything that does not add up, one sentence each.
    """

    issued: int
    trained: int
    dropped: dict[str, int]
    in_flight: tuple[int, ...]
    problems: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """issued = trained + dropped + in flight, and every group's events are in order."""
        return not self.problems


class Ledger:
    """The events of one run. May be used from several threads.

    Args:
        path: the database; made where it does not exist. On a local disk: SQLite locks files.

    Raises:
        DataError: the file cannot be opened, or is no ledger.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        try:
            self._database = sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S, check_same_thread=False)
            # A killed process loses nothing; only a power failure may lose the newest events, as it may a checkpoint.
            self._database.execute("PRAGMA synchronous = OFF")
            self._database.executescript(_SCHEMA)
        except sqlite3.Error as error:
            raise DataError(f"{path}: {error}; not a ledger, or not on a local disk") from error

    @classmethod
    def begin(cls, run_dir: Path) -> Ledger:
        """An empty ledger for a start of the run in ``run_dir``; what an earlier start left is removed."""
        for path in run_dir.glob(f"{FILE_NAME}*"):
            path.unlink()
        return cls(run_dir / FILE_NAME)

    # -------------------------------------------------------------------------------------------------------- events
    def issued(self, group_ids: Iterable[int], version: int) -> None:
        """Sent to an engine that serves weight ``version``."""
        self._add(group_ids, ISSUED, version=version)

    def reissued(self, group_ids: Iterable[int], version: int, reason: str) -> None:
        """Sent again from the beginning: nothing of it had been trained."""
        self._add(group_ids, REISSUED, version=version, reason=reason)

    def generated(self, group_ids: Iterable[int], version: int) -> None:
        """Record that all samples were generated."""
        self._add(group_ids, GENERATED, version=version)

    def scored(self, group_ids: Iterable[int]) -> None:
        """Record that all samples have rewards."""
        self._add(group_ids, SCORED)

    def trained(self, group_ids: Iterable[int], step: int) -> None:
        """Record that training step ``step`` is complete."""
        self._add(group_ids, TRAINED, step=step)

    def dropped(self, group_ids: Iterable[int], reason: str) -> None:
        """Will never be trained."""
        self._add(group_ids, DROPPED, reason=reason)

    def _add(
        self,
        group_ids: Iterable[int],
        state: str,
        version: int | None = None,
        step: int | None = None,
        reason: str | None = None,
    ) -> None:
        now = time.time()
        rows = [(group, state, version, step, reason, now) for group in group_ids]
        with self._lock, _refused_by_disk(self._path), self._database:
            self._database.executemany(
                "INSERT INTO events (group_id, state, version, step, reason, at) VALUES (?, ?, ?, ?, ?, ?)", rows
            )

    # ----------------------------------------------------------------------------------------------------- snapshots
    def snapshot(self, path: Path) -> None:
        """Copy everything up to now into the new file ``path``. Raises ``DataError`` where the disk refuses."""
        with self._lock, _refused_by_disk(path), closing(sqlite3.connect(path)) as copy:
            self._database.backup(copy)

    def restore(self, path: Path) -> None:
        """Become what ``snapshot`` copied; later events are forgotten.

        Raises:
            DataError: there is no snapshot at ``path``, or it is damaged.
        """
        if not path.is_file():
            raise DataError(f"{path} is missing: the checkpoint has no ledger; resume from another one")
        try:
            with self._lock, closing(sqlite3.connect(_read_only(path), uri=True)) as copy:
                copy.execute("SELECT count(*) FROM events").fetchone()
                copy.backup(self._database)
        except sqlite3.Error as error:
            raise DataError(f"{path}: {error}; the ledger is damaged: resume from another checkpoint") from error

    def close(self) -> None:
        """Close the file; may be called twice."""
        with self._lock:
            self._database.close()


def _read_only(path: Path) -> str:
    """Return a read-only URI of the path, with characters such as ``#`` escaped."""
    return f"{path.absolute().as_uri()}?mode=ro"


@contextmanager
def _refused_by_disk(path: Path) -> Iterator[None]:
    """Turn SQLite's errors of a failed write into one sentence."""
    try:
        yield
    except sqlite3.Error as error:
        raise DataError(f"{path}: could not be written ({error}); free space there") from error


def audit_run(run_dir: Path) -> Audit:
    """Follow every group of a finished or running run through its events.

    Raises:
        DataError: the run has no ledger, or it cannot be read.
    """
    path = run_dir / FILE_NAME
    if not path.is_file():
        raise DataError(f"{path} is missing: no run of rollouts has written to {run_dir}; give another directory")
    try:
        with closing(sqlite3.connect(_read_only(path), uri=True, timeout=_BUSY_TIMEOUT_S)) as database:
            rows = database.execute(
                "SELECT group_id, state, step, reason FROM events ORDER BY group_id, number"
            ).fetchall()
    except sqlite3.Error as error:
        raise DataError(f"{path}: {error}; not a ledger, or damaged") from error
    return audit_events(rows)


def audit_events(rows: Sequence[tuple[int, str, int | None, str | None]]) -> Audit:
    """``rows`` are (group id, state, step, reason), each group's together and in order."""
    histories: dict[int, list[tuple[str, int | None, str | None]]] = {}
    for group, state, step, reason in rows:
        histories.setdefault(group, []).append((state, step, reason))
    problems = [sentence for group, history in histories.items() for sentence in _problems(group, history)]
    missing = sorted(set(range(max(histories, default=-1) + 1)) - histories.keys())
    problems += [f"group {group} was never issued, though later ones were" for group in missing]
    ends = {group: _end(history) for group, history in histories.items()}
    return Audit(
        issued=sum(any(state == ISSUED for state, _, _ in history) for history in histories.values()),
        trained=sum(end == TRAINED for end in ends.values()),
        dropped=dict(
            Counter(
                next(reason or "" for state, _, reason in reversed(histories[group]) if state == DROPPED)
                for group, end in ends.items()
                if end == DROPPED
            )
        ),
        in_flight=tuple(group for group, end in ends.items() if end is None),
        problems=tuple(problems),
    )


def _end(history: Sequence[tuple[str, int | None, str | None]]) -> str | None:
    """ "trained" or "dropped"; ``None`` for a group that is still on its way."""
    return next((state for state, _, _ in history if state in (TRAINED, DROPPED)), None)


def _problems(group: int, history: Sequence[tuple[str, int | None, str | None]]) -> list[str]:
    """List impossible orders of one group's events."""
    states = [state for state, _, _ in history]
    found = []
    if states[0] != ISSUED or states.count(ISSUED) != 1:
        found.append(f"group {group} was issued {states.count(ISSUED)} times, and first {states[0]}")
    steps = [step for state, step, _ in history if state == TRAINED]
    if len(steps) > 1:
        found.append(f"group {group} was trained {len(steps)} times: in steps {', '.join(map(str, steps))}")
    if TRAINED in states and DROPPED in states:
        found.append(f"group {group} was trained and dropped")
    if states.count(DROPPED) > 1:
        found.append(f"group {group} was dropped {states.count(DROPPED)} times")
    if TRAINED in states:
        since = states[: states.index(TRAINED)]
        begun = max((i for i, state in enumerate(since) if state in (ISSUED, REISSUED)), default=0)
        if since[begun + 1 :] != [GENERATED, SCORED]:
            found.append(f"group {group} was trained after {', '.join(since)}")
    ended = next((i for i, state in enumerate(states) if state in (TRAINED, DROPPED)), len(states))
    late = [state for state in states[ended + 1 :] if state not in (TRAINED, DROPPED)]
    if late:
        found.append(f"group {group} was {late[0]} after it was {states[ended]}")
    return found
