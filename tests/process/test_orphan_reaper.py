"""Cleanup after a killed driver. Processes of its Ray session are found by the logs they write."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime_like.orchestration.cluster.cluster import orphan_reaper
from slime_like.orchestration.cluster.ray_session import link_logs, sessions

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
