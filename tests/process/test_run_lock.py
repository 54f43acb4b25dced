"""One run at a time in a run directory, over processes."""

import subprocess
import sys
from pathlib import Path

import pytest

from slime_like.errors import ConfigError
from slime_like.orchestration.run.directory import RunDirectory
from slime_like.orchestration.run.lock import LOCK_FILE, RunLock
from tests.unit.orchestration.run.test_directory import config, prepare_run_dir, write_checkpoint

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
