"""Audit of a ledger after its writer ended, also by a process without write permission."""

import ctypes
import multiprocessing
import os
from contextlib import closing
from pathlib import Path

import pytest

from slime_like.data.ledger import FILE_NAME, GENERATED, ISSUED, SCORED, TRAINED, Ledger, audit_run

FORK = multiprocessing.get_context("fork")


def _write(run_dir: Path, journal: str, *, killed: bool) -> None:
    """Write events of two groups and, if ``killed``, a part of an unfinished transaction."""
    ledger = Ledger.begin(run_dir)
    ledger._database.execute(f"PRAGMA journal_mode = {journal}")
    ledger.add([0, 1], ISSUED, version=0)
    ledger.add([0], GENERATED, version=0)
    ledger.add([0], SCORED)
    ledger.add([0], TRAINED, step=1)
    if killed:
        ledger._database.execute("PRAGMA cache_size = 1")
        rows = ((group,) for group in range(2, 900))
        ledger._database.executemany("INSERT INTO events (group_id, state, at) VALUES (?, 'trained', 0)", rows)
        os._exit(0)
    ledger.close()


def _audit_without_rights(run_dir: Path) -> None:
    header, no_capabilities = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    assert ctypes.CDLL(None).capset(header, no_capabilities) == 0  # root's files, too, have modes from here on
    with pytest.raises(PermissionError):
        (run_dir / "new").touch()
    audit = audit_run(run_dir)
    assert (audit.trained, audit.in_flight, audit.problems) == (1, (1,), ())


def _finish(process: multiprocessing.process.BaseProcess) -> int | None:
    process.start()
    process.join(60)
    return process.exitcode


@pytest.mark.parametrize(
    ("journal", "killed", "left"),
    [("WAL", True, ["", "-shm", "-wal"]), ("DELETE", True, ["", "-journal"]), ("WAL", False, [""])],
)
def test_it_is_read(tmp_path: Path, journal: str, killed: bool, left: list[str]) -> None:
    assert _finish(FORK.Process(target=_write, args=(tmp_path, journal), kwargs={"killed": killed})) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [FILE_NAME + ending for ending in left]
    tmp_path.chmod(0o555)
    code = _finish(FORK.Process(target=_audit_without_rights, args=(tmp_path,)))
    tmp_path.chmod(0o755)
    assert code == 0
    audit = audit_run(tmp_path)
    assert (audit.trained, audit.in_flight, audit.problems) == (1, (1,), ())
    with closing(Ledger.begin(tmp_path)) as ledger:  # what was left belongs to no later ledger
        assert ledger.count() == 0
