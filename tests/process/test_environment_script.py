"""Scripts use a complete environment without writing to it, also where another user owns it."""

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
_HASHED = ("constraints.txt", "pyproject.toml", "scripts/environment.sh")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what the script reads, whose environment is complete, and whose lock cannot be opened, not by root
    either."""
    for name in _HASHED:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(REPO / name, tmp_path / name)
    content = b"".join((tmp_path / name).read_bytes() for name in _HASHED)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".slime-like-runtime").write_text(hashlib.sha256(content).hexdigest())
    (tmp_path / ".venv.lock").mkdir()
    return tmp_path


def ensure(checkout: Path, kind: str = "", before: str = "") -> subprocess.CompletedProcess[str]:
    script = f'set -euo pipefail; source "$0"; {before} ensure_environment {kind}; echo used'
    command = ["bash", "-c", script, str(checkout / "scripts" / "environment.sh")]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("kind", ["", "runtime"])
def test_a_complete_environment_needs_no_lock(checkout: Path, kind: str) -> None:
    done = ensure(checkout, kind)
    assert (done.returncode, done.stdout, done.stderr) == (0, "used\n", "")


@pytest.mark.parametrize("kind", ["", "dev"])
def test_one_that_is_not_complete_is_rejected_where_it_cannot_be_changed(checkout: Path, kind: str) -> None:
    """For other versions, or without the test tools."""
    if not kind:
        with (checkout / "constraints.txt").open("a") as file:
            file.write("more==1\n")
    done = ensure(checkout, kind)
    assert done.returncode == 1 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert f"the {kind or 'runtime'} environment in {checkout / '.venv'} is not complete" in line


def test_the_lock_is_taken_before_anything_is_installed(checkout: Path) -> None:
    (checkout / ".venv.lock").rmdir()
    (checkout / ".venv" / ".slime-like-runtime").write_text("of other versions")
    done = ensure(checkout, before='install_environment() { flock -n "$VENV.lock" true || echo locked; };')
    assert (done.returncode, done.stdout) == (0, "locked\nused\n")
