"""Logs of a Ray session are kept in place of their link. Everything else is removed."""

import shutil
import uuid
from pathlib import Path
from unittest.mock import Mock

import pytest

from slime_like.orchestration.cluster.ray_session import keep_logs_only, link_logs, make_room, put_away
from slime_like.system.disk import open_log


def session(root: Path, content: str = "own") -> Path:
    (root / "logs").mkdir(parents=True)
    (root / "sockets").mkdir()
    (root / "logs" / "engine-0.log").write_text(content)
    return root


def test_logs_of_every_start_are_kept(tmp_path: Path) -> None:
    logs = tmp_path / "worker_logs"
    for start in ("first", "second", "third"):
        home = session(tmp_path / start, start)
        make_room(logs)
        link_logs(home, logs)
        assert (logs / "engine-0.log").read_text() == start
        put_away(home, logs)
        assert not home.exists()
    kept = {path.name: (path / "engine-0.log").read_text() for path in tmp_path.iterdir()}
    assert kept == {"worker_logs": "third", "worker_logs.1": "first", "worker_logs.2": "second"}


def test_logs_of_old_starts_are_removed(tmp_path: Path) -> None:
    """A run that is restarted for weeks keeps the last ten. A directory with another name is not touched."""
    logs, other = tmp_path / "worker_logs", tmp_path / "worker_logs.kept"
    other.mkdir()
    for _ in range(13):
        logs.mkdir()
        make_room(logs)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"worker_logs.{number}" for number in range(4, 14)} | {other.name}


def test_rays_logs_are_set_apart_and_empty_ones_are_removed(tmp_path: Path) -> None:
    home, logs = session(tmp_path / "own"), tmp_path / "worker_logs"
    roles = ("engine-0", "trainer-0", "reference-1-2", "reward-3", "environment-0-1")
    for role in roles:
        open_log(home / "logs", role).close()
    ray = ("raylet.out", "python-core-driver-01_7.log", "worker-1b-01-7.err", "events/event_GCS.log")
    for name in (*ray, "raylet.err", "old/"):
        path = home / "logs" / name
        (path if name.endswith("/") else path.parent).mkdir(exist_ok=True)
        if not name.endswith("/"):
            path.write_text("x" if name in ray else "")
    link_logs(home, logs)
    put_away(home, logs)
    kept = {str(path.relative_to(logs)) for path in logs.rglob("*") if path.is_file()}
    # Each process in a role has a log: engine-0.log was there already.
    assert kept == {f"{role}.log" for role in roles} | {"engine-0.2.log"} | {f"ray/{name}" for name in ray}
    assert not (logs / "ray" / "old").exists() and (logs / "engine-0.log").read_text() == "own"


def test_the_link_of_another_session_stays(tmp_path: Path) -> None:
    """The run was started again before the guard of a killed start cleaned up."""
    old, new, logs = session(tmp_path / "old"), session(tmp_path / "new", "new"), tmp_path / "worker_logs"
    link_logs(new, logs)
    put_away(old, logs)
    assert not old.exists() and (logs / "engine-0.log").read_text() == "new" and logs.is_symlink()


def test_files_that_a_daemon_writes_during_the_removal_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, remove = session(tmp_path / "own"), shutil.rmtree
    calls: list[Path] = []

    def late(path: Path, ignore_errors: bool) -> None:
        calls.append(path)
        remove(path, ignore_errors=ignore_errors)
        if len(calls) == 1:
            (path / "sockets").mkdir(parents=True)

    monkeypatch.setattr(shutil, "rmtree", late)
    put_away(home, tmp_path / "worker_logs")
    assert len(calls) == 2 and not home.exists()


def test_shared_memory_named_after_a_file_of_the_session_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that is killed while it starts leaves it. Another session's shared memory stays."""
    home, shared = session(tmp_path / "own"), tmp_path / "shm"
    monkeypatch.setattr("slime_like.orchestration.cluster.ray_session.SHARED_MEMORY", shared)
    shared.mkdir()
    own, other = (f"vllm_dist_{uuid.uuid4().hex}" for _ in range(2))
    (home / own).touch()
    for name in (f"{own}-tp:0-[0-1]-cpushm_0", f"{own}-tp:0-[0-1]-cpushm_1", f"{other}-tp:0", "logs-1"):
        (shared / name).touch()
    put_away(home, tmp_path / "worker_logs")
    assert {path.name for path in shared.iterdir()} == {f"{other}-tp:0", "logs-1"}


def test_logs_stay_in_the_session_if_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, logs = session(tmp_path / "own"), tmp_path / "worker_logs"
    link_logs(home, logs)
    monkeypatch.setattr(shutil, "move", Mock(side_effect=OSError(28, "No space left on device")))
    put_away(home, logs)
    assert (logs / "engine-0.log").read_text() == "own"


def test_a_launched_node_keeps_only_its_logs(tmp_path: Path) -> None:
    home = session(tmp_path / "own")
    (home / "engine.sock").write_text("")
    (home / "latest").symlink_to(home / "logs")
    keep_logs_only(home)
    assert [path.name for path in home.iterdir()] == ["logs"] and (home / "logs" / "engine-0.log").read_text() == "own"
