"""What other processes leave or hold: sessions, locks, ledgers, and stopped children."""

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from slime_like.data.ledger import FILE_NAME, GENERATED, ISSUED, SCORED, TRAINED, Ledger, audit_run
from slime_like.errors import ConfigError
from slime_like.orchestration.cluster.cluster import orphan_reaper
from slime_like.orchestration.cluster.ray_session import RAY_DIRECTORY, link_logs, sessions
from slime_like.orchestration.cluster.stopped import stopped_processes
from slime_like.orchestration.run.directory import RunDirectory
from slime_like.orchestration.run.lock import LOCK_FILE, RunLock
from slime_like.weights.transports.shared_memory import SharedSegment
from tests.process.conftest import wait_until
from tests.unit.orchestration.run.test_directory import config, prepare_run_dir, write_checkpoint

DRIVER = 4_000_000  # no process has this id
HOLD = "import sys, time; file = open(sys.argv[1], sys.argv[2]); print('open', flush=True); time.sleep(300)"


def holder(path: Path, mode: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(path), mode], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "open\n"
    return process


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[dict[str, subprocess.Popen[str]]]:
    logs = tmp_path / "private" / "r" / f"session_2026-01-01_00-00-00_000000_{DRIVER}" / "logs"
    other = tmp_path / "other" / "r" / f"session_2026-01-01_00-00-00_000000_{DRIVER}"  # in another container
    logs.mkdir(parents=True)
    other.mkdir(parents=True)
    (logs / "read").write_text("")
    started = {
        "agent": holder(logs / "agent.log", "a"),
        "reader": holder(logs / "read", "r"),
        "another session": holder(other / "agent.log", "a"),
    }
    yield started
    for process in started.values():
        process.kill()
        process.communicate()


def test_a_dismissed_guard_changes_nothing(tmp_path: Path, processes: dict[str, subprocess.Popen[str]]) -> None:
    watching = orphan_reaper.start(DRIVER, tmp_path / "private", tmp_path / "logs", "slime-test-guard")
    assert orphan_reaper.dismiss(watching, in_order=True) and watching.returncode == 0
    assert processes["agent"].poll() is None


@pytest.mark.parametrize("driver_reports", [False, True])
def test_the_guard_of_a_failed_or_killed_driver_cleans_up_and_reports_only_the_kill(
    tmp_path: Path, processes: dict[str, subprocess.Popen[str]], capfd: pytest.CaptureFixture[str], driver_reports: bool
) -> None:
    """It ends only processes that write the session's logs."""
    name = f"slime-test-{os.getpid()}"
    left = Path("/dev/shm") / f"{name}.1.0"
    left.write_bytes(b"x")
    (session,) = sessions(tmp_path / "private")
    (session / "logs" / "raylet.out").write_text("x")
    link_logs(session, tmp_path / "worker_logs")
    watching = orphan_reaper.start(DRIVER, tmp_path / "private", tmp_path / "worker_logs", name)
    assert watching.stdin is not None
    if driver_reports:
        assert orphan_reaper.dismiss(watching, in_order=False)
    else:
        watching.stdin.close()  # like the kernel does for a killed process
    assert watching.wait(60) == 0
    assert processes["agent"].wait(30) == -9
    assert [name for name, process in processes.items() if process.poll() is not None] == ["agent"]
    assert not left.exists()
    assert not (tmp_path / "private").exists() and len(sessions(tmp_path / "other")) == 1
    assert (tmp_path / "worker_logs" / "ray" / "raylet.out").is_file() and not (tmp_path / "worker_logs").is_symlink()
    said = capfd.readouterr().err
    assert said.count("\n") == (0 if driver_reports else 1)
    assert driver_reports or said.startswith(f"slime-like: the driver (process {DRIVER}) was killed: ")


PLASMA = "[W 7 7] connection.cc:216: The connection to the plasma store is failed. Terminate the process.\n"


@pytest.mark.parametrize(
    ("driver", "raylet", "expected"),
    [
        (PLASMA + "[I 7 7] it was long ago\n" * 1000, "", None),
        (PLASMA, "one Ray agent failed, agent_name = mine.\n", "its raylet had ended, since its mine had ended"),
        ("[C 7 7] Failed to connect to GCS at address 127.0.0.1:1\n", "", "its gcs_server had ended"),
    ],
)
def test_logs_name_the_daemon_whose_loss_ended_the_driver(
    tmp_path: Path, driver: str, raylet: str, expected: str | None
) -> None:
    (tmp_path / "python-core-driver-01_7.log").write_text(driver)
    (tmp_path / "raylet.err").write_text(raylet)
    assert orphan_reaper.lost_daemon(tmp_path) == expected


_SECOND = """
import sys
from pathlib import Path
from slime_like.orchestration.run.lock import RunLock
with RunLock(Path(sys.argv[1])):
    print("alone", flush=True)
    sys.stdin.read()
"""


def test_one_run_at_a_time(tmp_path: Path) -> None:
    """Another process's lock is reported with its number, survives the directory's move, and ends when it is killed."""
    run_dir = tmp_path / "run"
    other = subprocess.Popen(
        [sys.executable, "-c", _SECOND, str(run_dir)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None and other.stdout.readline() == "alone\n"
        with pytest.raises(
            ConfigError, match=f"another run uses this directory .process {other.pid} on .*set another run_dir"
        ):
            prepare_run_dir(config(tmp_path))
        assert [path.name for path in run_dir.iterdir()] == [LOCK_FILE]
    finally:
        other.kill()
        other.communicate(timeout=30)
    prepare_run_dir(config(tmp_path))
    write_checkpoint(run_dir, 3)
    with RunLock(run_dir) as lock:
        RunDirectory(config(tmp_path)).make(None, lock)  # resume: never
        assert not (tmp_path / "run.1" / LOCK_FILE).exists()
        with pytest.raises(ConfigError, match="another run uses this directory"):
            prepare_run_dir(config(tmp_path))
    assert not (run_dir / LOCK_FILE).exists()


def test_a_stopped_child_of_a_worker_is_found_and_ended(tmp_path: Path) -> None:
    command = ["sh", "-c", "sleep 600 & wait"]
    with (tmp_path / "engine-3.2.log").open("wb") as log, subprocess.Popen(command, stdout=log) as worker:
        try:
            wait_until(lambda: psutil.Process(worker.pid).children() != [])
            (child,) = psutil.Process(worker.pid).children()
            assert stopped_processes([worker.pid], "here") == []
            child.send_signal(signal.SIGSTOP)
            wait_until(lambda: child.status() == psutil.STATUS_STOPPED)
            (found,) = stopped_processes([worker.pid, 2**22 + 1], "here")
            assert (found.node, found.process, found.role) == ("here", child.pid, "engine-3.2")
            assert stopped_processes([worker.pid], "here", end=[found]) == [found]
            worker.wait(10)  # it waits for its child
        finally:
            for process in (*psutil.Process(worker.pid).children(), worker) if worker.poll() is None else ():
                process.kill()


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


def test_a_start_removes_what_killed_runs_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their drivers and reapers were killed together. What a living process uses, or is recent, stays."""
    shared, dead, run = tmp_path / "shm", 2**22 + 1, "slime-0123456789ab"
    shared.mkdir()
    monkeypatch.setattr(orphan_reaper, "SHARED_MEMORY", shared)
    monkeypatch.setattr(orphan_reaper, "_STALE_S", 60.0)
    in_use = SharedSegment.create(shared / f"{run}.{dead}.aa.0", 4096)  # in a container, the maker has another id
    (shared / f"{run}.{dead}.aa.1").touch()
    (shared / f"{run}.{os.getpid()}.bb.0").touch()
    (shared / f"{run}.1.cc.0").touch()
    monkeypatch.setattr(orphan_reaper, "_lives_since", lambda process, _: process == os.getpid())
    (shared / "slime-notes.txt").touch()
    logs = tmp_path / "run" / "worker_logs"
    logs.parent.mkdir()
    for name, age_s in (("old", 600), ("written", 600), ("recent", 0)):
        session = tmp_path / f"slime-{name}" / RAY_DIRECTORY / "session_2026_1"
        (session / "logs").mkdir(parents=True)
        (session / "logs" / "engine-0.log").write_text(name)
        for path in (tmp_path / f"slime-{name}", session / "logs", session / "logs" / "engine-0.log"):
            os.utime(path, (time.time() - age_s,) * 2)
    (tmp_path / "slime-data").mkdir()
    logs.symlink_to(tmp_path / "slime-old" / RAY_DIRECTORY / "session_2026_1" / "logs")
    with (tmp_path / "slime-written" / RAY_DIRECTORY / "session_2026_1" / "logs" / "engine-0.log").open("a"):
        orphan_reaper.remove_stale(tmp_path, logs)
    assert {path.name for path in tmp_path.glob("slime-*")} == {"slime-written", "slime-recent", "slime-data"}
    assert not logs.is_symlink() and (logs / "engine-0.log").read_text() == "old"
    left = {path.name for path in shared.iterdir()}
    assert left == {in_use.name, f"{run}.{os.getpid()}.bb.0", "slime-notes.txt"}
    in_use.remove()


def test_a_later_process_with_the_same_id_is_not_the_maker() -> None:
    started = psutil.Process().create_time()
    lives = orphan_reaper._lives_since
    assert lives(os.getpid(), started + 1) and not lives(os.getpid(), started - 1) and not lives(2**22 + 1, started)
