"""Ledger of a run's prompt groups: everything that happened to them, as events in SQLite.

Events are only added, so the ledger can be audited: its events show that a group was trained once. A checkpoint holds a
copy. Resuming restores the copy, so whatever happened after the checkpoint happens again.
"""

import re
import shutil
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Self

from slime_like.errors import DataError, SlimeLikeError

FILE_NAME = "ledger.sqlite"
_MODE = 0o600
"""Mode of the ledger and of SQLite's files next to it. Whoever can read them can lock them, and so end the run."""

ISSUED, REISSUED, GENERATED, SCORED, TRAINED, DROPPED, FAILED = (
    "issued", "reissued", "generated", "scored", "trained", "dropped", "failed",
)  # fmt: skip
"""States of a group. ``FAILED`` is an event of one of its rollouts, and the reason says what became of it."""
_ENDED = (TRAINED, DROPPED)
_SOUND = re.compile(
    r"issued( reissued| generated| scored)*( dropped)?|"
    r"(issued( reissued| generated| scored)* re)?issued generated scored trained"
)
"""Events of one group that are in order: it is issued once and ends at most once, and a trained group was generated and
scored since it was last issued."""

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
_REFUSALS = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)


@dataclass(frozen=True, slots=True)
class Audit:
    """Summary of a run's events: numbers of groups, dropped groups by reason, groups that have not ended, and failed
    rollouts by what became of them and why.

    ``problems`` has a sentence for every inconsistency. Without any, issued = trained + dropped + in flight.
    """

    issued: int
    trained: int
    dropped: dict[str, int]
    in_flight: tuple[int, ...]
    failed: dict[str, int]
    problems: tuple[str, ...]


class Ledger:
    """Events of one run. May be used from several threads.

    A write-ahead log lets others read while the run writes. It needs memory shared between processes, so the ledger of
    an active run can only be read on the same host. A file system that cannot map files is rejected. Raises
    ``DataError`` if the file is not a ledger or cannot have a write-ahead log, and ``SlimeLikeError`` if the disk
    refuses.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        try:
            path.touch(_MODE)
            path.chmod(_MODE)
            self._database = sqlite3.connect(path, timeout=_BUSY_TIMEOUT_S, check_same_thread=False)
            mode = self._database.execute("PRAGMA journal_mode = WAL").fetchone()[0]
            if mode != "wal":
                raise sqlite3.OperationalError(f"no write-ahead log here, but {mode}")
            # A killed process loses nothing. A power failure may lose the newest events.
            self._database.execute("PRAGMA synchronous = NORMAL")
            self._database.executescript(_SCHEMA)
        except (sqlite3.Error, OSError) as error:
            raise _unusable(path, error, "it is not a ledger, or its file system cannot map files") from error

    @classmethod
    def begin(cls, run_dir: Path) -> Self:
        """Create an empty ledger for the run in ``run_dir``, and remove what an earlier start left."""
        for path in run_dir.glob(f"{FILE_NAME}*"):
            path.unlink()
        return cls(run_dir / FILE_NAME)

    def add(
        self,
        group_ids: Iterable[int],
        state: str,
        *,
        version: int | None = None,
        step: int | None = None,
        reason: str | None = None,
    ) -> None:
        """Record that groups are now in ``state``.

        Args:
            version: weight version of the engine that samples or has sampled them.
            reason: why they were issued again, or will never be trained.
        """
        rows = [(group, state, version, step, reason, time.time()) for group in group_ids]
        with self._lock, _refused_by_disk(self._path), self._database:
            self._database.executemany(
                "INSERT INTO events (group_id, state, version, step, reason, at) VALUES (?, ?, ?, ?, ?, ?)", rows
            )

    def snapshot(self, path: Path) -> None:
        """Copy all events so far into the new file ``path``. Raises ``SlimeLikeError`` if the disk refuses."""
        with self._lock, _refused_by_disk(path), closing(sqlite3.connect(path)) as copy:
            self._database.backup(copy)
            copy.execute("PRAGMA journal_mode = DELETE")  # a single file, readable where nothing may be written

    def count(self) -> int:
        """Return the number of the latest event, counted from 1 without gaps, or 0 without events."""
        with self._lock:
            return int(self._database.execute("SELECT coalesce(max(number), 0) FROM events").fetchone()[0])

    def restore(self, path: Path, count: int | None = None) -> None:
        """Replace the ledger with a copy made by ``snapshot``, limited to its first ``count`` events.

        Raises ``DataError`` if there is no snapshot at ``path``, or it is damaged.
        """
        if not path.is_file():
            problem, remedy = f"{path} is missing: the checkpoint has no ledger", "resume from another one"
            raise DataError(problem, code="no-ledger", remedy=remedy)
        try:
            with self._lock, closing(sqlite3.connect(_read_only(path), uri=True)) as copy:
                copy.execute("SELECT count(*) FROM events").fetchone()
                copy.backup(self._database)
            if count is not None:
                with self._lock, self._database:
                    self._database.execute("DELETE FROM events WHERE number > ?", (count,))
        except sqlite3.Error as error:
            raise _unusable(path, error, "the ledger is damaged: resume from another checkpoint") from error

    def close(self) -> None:
        """Close the file. May be called twice."""
        with self._lock:
            self._database.close()


def _unusable(path: Path, error: sqlite3.Error | OSError, remedy: str) -> SlimeLikeError:
    """Describe a refusal of the disk, which may pass, or a file that is not a ledger."""
    if isinstance(error, OSError) or getattr(error, "sqlite_errorcode", 0) & 0xFF in _REFUSALS:
        return SlimeLikeError(str(error), code="disk-refused", who=str(path), remedy="free space there")
    return DataError(str(error), code="damaged-ledger", who=str(path), remedy=remedy)


def _read_only(path: Path) -> str:
    """Return a read-only URI of the path, with characters such as ``#`` escaped."""
    return f"{path.absolute().as_uri()}?mode=ro"


@contextmanager
def _refused_by_disk(path: Path) -> Iterator[None]:
    """Turn SQLite's write errors into one sentence."""
    try:
        yield
    except sqlite3.Error as error:
        problem, code, remedy = f"could not be written ({error})", "disk-refused", "free space there"
        if getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY:
            code, remedy = "ledger-locked", "end the other writer, such as an open sqlite3 shell"
        raise SlimeLikeError(problem, code=code, who=str(path), remedy=remedy) from error


def audit_run(run_dir: Path) -> Audit:
    """Follow every group of a finished or running run through its events.

    Raises ``DataError`` if the run has no ledger, or the ledger cannot be read.
    """
    path = run_dir / FILE_NAME
    if not path.is_file():
        problem = f"{path} is missing: no run of rollouts has written to {run_dir}"
        raise DataError(problem, code="no-ledger", remedy="give another directory")
    try:
        with ExitStack() as stack:
            return _audit(_readable(path, stack))
    except sqlite3.Error as error:
        raise _unusable(path, error, "it is not a ledger, or damaged") from error


def _readable(path: Path, stack: ExitStack) -> sqlite3.Connection:
    """Open a ledger for reading, whether its writer is running or was killed.

    SQLite may have to write next to the file before it can read it. If that is refused, this reads a copy. Raises
    ``DataError`` if the ledger cannot be copied.
    """
    uri = _read_only(path)
    database = stack.enter_context(closing(sqlite3.connect(uri, uri=True, timeout=_BUSY_TIMEOUT_S)))
    try:
        database.execute("SELECT 1 FROM events LIMIT 1").fetchone()
    except sqlite3.OperationalError:
        copy = Path(stack.enter_context(TemporaryDirectory())) / FILE_NAME
        try:
            for ending in ("", "-wal", "-journal"):
                if (part := path.with_name(path.name + ending)).exists():
                    shutil.copyfile(part, copy.with_name(copy.name + ending))
        except OSError as error:
            problem, remedy = f"could not be copied to {copy} ({error.strerror})", "free space there, or set TMPDIR"
            raise DataError(problem, code="ledger-not-copied", who=str(path), remedy=remedy) from error
        return stack.enter_context(closing(sqlite3.connect(copy)))
    return database


_HISTORIES = f"""
SELECT group_id, group_concat(state, ' '), max(reason) FILTER (WHERE state = '{DROPPED}')
FROM events INDEXED BY events_of_group WHERE state != '{FAILED}' GROUP BY group_id ORDER BY group_id
"""
"""Histories of all groups. The index returns a group's states in the order of their numbers."""


def _audit(database: sqlite3.Connection) -> Audit:
    """Audit the groups one at a time. A run has few different state sequences, each of them many times."""
    ended: dict[str, str | None] = {}  # final state of groups with these states, if they are consistent
    ends: Counter[str | None] = Counter()
    dropped: Counter[str] = Counter()
    in_flight: list[int] = []
    problems: list[str] = []
    issued = following = 0
    for group, states, reason in database.execute(_HISTORIES):
        problems += [f"group {missing} was never issued, though later ones were" for missing in range(following, group)]
        following = group + 1
        issued += ISSUED in states.split()
        end = ended.get(states)
        if states not in ended:
            end = next((state for state in states.split() if state in _ENDED), None)
            if _SOUND.fullmatch(states):
                ended[states] = end
            else:
                problems.append(f"group {group} was {states.replace(' ', ', ')}")
        ends[end] += 1
        if end is None:
            in_flight.append(group)
        elif end == DROPPED:
            dropped[reason or ""] += 1
    failed = dict(database.execute("SELECT reason, count(*) FROM events WHERE state = ? GROUP BY reason", [FAILED]))
    return Audit(issued, ends[TRAINED], dict(dropped), tuple(in_flight), failed, tuple(problems))
