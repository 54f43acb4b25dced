"""Logs of a Ray session are kept where they were linked; the rest of it goes."""

import shutil
from pathlib import Path
from unittest.mock import Mock

import pytest

from slime_like.orchestration.cluster.ray_session import keep_logs_only, link_logs, make_room, put_away
from slime_like.system.disk import open_log


def session(root: Path, content: str) -> Path:
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


def test_what_ray_writes_stands_apart_and_empty_files_go(tmp_path: Path) -> None:
    home, logs = session(tmp_path / "own", "own"), tmp_path / "worker_logs"
    for role in ("engine-0", "trainer-0", "reference-1-2", "reward-3", "environment-0-1"):
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
    own = {"engine-0.log", "engine-0.2.log", "trainer-0.log", "reference-1-2.log"} | {
        "reward-3.log",
        "environment-0-1.log",
    }
    assert kept == own | {f"ray/{name}" for name in ray}
    assert not (logs / "ray" / "old").exists()


def test_every_process_in_a_role_has_a_log(tmp_path: Path) -> None:
    for content in (b"first", b"second", b"third"):
        with open_log(tmp_path, "engine-0") as file:
            file.write(content)
    open_log(tmp_path, "engine-1").close()
    kept = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert kept == {"engine-0.log": "first", "engine-0.2.log": "second", "engine-0.3.log": "third", "engine-1.log": ""}


def test_another_sessions_link_is_left_alone(tmp_path: Path) -> None:
    """The run has been started again before the guard of a killed start gets to it."""
    old, new, logs = session(tmp_path / "old", "old"), session(tmp_path / "new", "new"), tmp_path / "worker_logs"
    link_logs(new, logs)
    put_away(old, logs)
    assert not old.exists() and (logs / "engine-0.log").read_text() == "new" and logs.is_symlink()


def test_what_a_daemon_writes_while_a_session_is_removed_goes_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, remove = session(tmp_path / "own", "own"), shutil.rmtree
    calls: list[Path] = []

    def late(path: Path, ignore_errors: bool) -> None:
        calls.append(path)
        remove(path, ignore_errors=ignore_errors)
        if len(calls) == 1:  # the directory was not empty when it was to be removed
            (path / "sockets").mkdir(parents=True)

    monkeypatch.setattr(shutil, "rmtree", late)
    put_away(home, tmp_path / "worker_logs")
    assert len(calls) == 2 and not home.exists()


def test_shared_memory_named_after_a_file_of_the_session_goes_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an engine that was killed while it started; another session's stays."""
    home, shared = session(tmp_path / "own", "own"), tmp_path / "shm"
    monkeypatch.setattr("slime_like.orchestration.cluster.ray_session.SHARED_MEMORY", shared)
    shared.mkdir()
    (home / "vllm_dist_0af3").touch()
    for name in ("vllm_dist_0af3-tp:0-[0-1]-cpushm_0", "vllm_dist_0af3-tp:0-[0-1]-cpushm_1", "vllm_dist_b7-tp:0"):
        (shared / name).touch()
    put_away(home, tmp_path / "worker_logs")
    assert [path.name for path in shared.iterdir()] == ["vllm_dist_b7-tp:0"]


def test_without_room_the_logs_stay_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, logs = session(tmp_path / "own", "own"), tmp_path / "worker_logs"
    link_logs(home, logs)
    monkeypatch.setattr(shutil, "move", Mock(side_effect=OSError(28, "No space left on device")))
    put_away(home, logs)
    assert (logs / "engine-0.log").read_text() == "own"


def test_of_a_node_s_session_the_logs_alone_stay(tmp_path: Path) -> None:
    home = session(tmp_path / "own", "own")
    (home / "engine.sock").write_text("")
    (home / "latest").symlink_to(home / "logs")
    keep_logs_only(home)
    assert [path.name for path in home.iterdir()] == ["logs"] and (home / "logs" / "engine-0.log").read_text() == "own"
