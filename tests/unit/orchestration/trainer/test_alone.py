"""A temporary run directory: removed after success and rejection, kept for the logs of a failure."""

from pathlib import Path

import pytest

from slime_like.errors import ConfigError, TrainerError
from slime_like.orchestration.trainer.alone import run_directory


def test_a_temporary_directory_stays_only_for_a_failure(tmp_path: Path) -> None:
    path = tmp_path / "scratch"
    with run_directory(path, temporary=True):
        assert path.stat().st_mode & 0o777 == 0o700
    assert not path.exists()
    with pytest.raises(ConfigError), run_directory(path, temporary=True):
        raise ConfigError(["too few devices"])
    assert not path.exists()
    with pytest.raises(TrainerError), run_directory(path, temporary=True):
        raise TrainerError("rank 1 died")
    assert path.is_dir()
    with pytest.raises(FileExistsError), run_directory(path, temporary=True):  # never another one's
        pass
    assert path.is_dir()
    with run_directory(path, temporary=False):  # the user's stays
        pass
    assert path.is_dir()
