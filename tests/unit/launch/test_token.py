"""Ray's token: created once, and readable only by its owner."""

import stat
import threading
from pathlib import Path

import pytest

from slime_like.config.launch import launch_directory
from slime_like.errors import LaunchError
from slime_like.orchestration.cluster.token import await_token, create_token
from tests.support.rejections import Rejects


def test_a_key_is_created_once_and_found_by_waiting_nodes(tmp_path: Path) -> None:
    path = launch_directory(tmp_path / "runs" / "first") / "key"
    assert path == tmp_path / "runs" / ".first.cluster" / "key"  # not in the run directory, which may be moved aside
    found: list[str] = []
    waiting = threading.Thread(target=lambda: found.append(await_token(path, 20)))
    waiting.start()
    key = create_token(path)
    waiting.join()
    assert found == [key] == [create_token(path)] and len(key) >= 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [entry.name for entry in path.parent.iterdir()] == ["key"]


@pytest.mark.parametrize(
    ("mode", "text", "code"),
    [(0o640, "x" * 32, "key-unsafe"), (0o604, "x" * 32, "key-unsafe"), (0o600, "x" * 15, "key-short")],
)
def test_an_unsafe_key_is_rejected(tmp_path: Path, mode: int, text: str, code: str, rejects: Rejects) -> None:
    path = tmp_path / "key"
    path.write_text(text)
    path.chmod(mode)
    for read in (create_token, lambda path: await_token(path, 1)):
        with rejects(LaunchError, code):
            read(path)


def test_a_key_that_nobody_creates_is_given_up(tmp_path: Path, rejects: Rejects) -> None:
    with rejects(LaunchError, "key-missing"):
        await_token(tmp_path / "key", 0.0)
