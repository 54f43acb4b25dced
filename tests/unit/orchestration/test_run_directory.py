"""What a run finds in its directory, and what it leaves of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slime_like.config import RunConfig
from slime_like.config.load import load_config
from slime_like.errors import CheckpointError, ConfigError
from slime_like.orchestration.checkpoints import write_state
from slime_like.orchestration.run_directory import prepare_run_dir, write_summary


def config(root: Path, **changes: Any) -> RunConfig:
    return RunConfig.model_validate({"run_dir": root / "run", "model": {"path": root / "model"}, "steps": 5, **changes})


def write_checkpoint(run_dir: Path, step: int, **state: Any) -> Path:
    directory = run_dir / "checkpoints" / f"step-{step:06d}"
    directory.mkdir(parents=True)
    write_state(directory, step, {"data": {}, **state})
    latest = run_dir / "checkpoints" / "latest"
    latest.unlink(missing_ok=True)
    latest.symlink_to(directory.name)
    (run_dir / "metrics.jsonl").write_text("{}\n")
    return directory


def test_a_new_run_saves_its_configuration(tmp_path: Path) -> None:
    assert prepare_run_dir(config(tmp_path)) == (None, [])
    assert load_config(tmp_path / "run" / "config.yaml", []) == config(tmp_path)


def test_changed_settings_are_told_and_the_old_ones_kept(tmp_path: Path) -> None:
    prepare_run_dir(config(tmp_path))
    write_checkpoint(tmp_path / "run", 3)
    checkpoint, changed = prepare_run_dir(config(tmp_path, algorithm={"kl_coef": 0.5}, steps=9))
    assert checkpoint is not None and checkpoint.step == 3
    assert changed == ["steps: 5 -> 9", "algorithm.kl_coef: 0.0 -> 0.5"]
    assert load_config(tmp_path / "run" / "config.yaml", []).algorithm.kl_coef == 0.5
    assert load_config(tmp_path / "run" / "config.until-step-000003.yaml", []) == config(tmp_path)
    assert prepare_run_dir(config(tmp_path, algorithm={"kl_coef": 0.5}, steps=9))[1] == []


def test_a_finished_run_is_refused_and_an_unfinished_end_is_not(tmp_path: Path) -> None:
    """Killed between its last checkpoint and its last file, a run must be able to end."""
    prepare_run_dir(config(tmp_path))
    write_checkpoint(tmp_path / "run", 5)
    assert prepare_run_dir(config(tmp_path))[0] is not None
    write_summary(config(tmp_path), {"wall_s": 1.0})
    with pytest.raises(ConfigError, match="has finished 5 steps; raise steps"):
        prepare_run_dir(config(tmp_path))
    assert prepare_run_dir(config(tmp_path, steps=6))[0] is not None


def test_another_runs_checkpoint_does_not_mix_with_what_is_there(tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", 2)
    prepare_run_dir(config(tmp_path))
    write_checkpoint(tmp_path / "run", 3)
    checkpoint, changed = prepare_run_dir(config(tmp_path, resume=str(other)))
    assert checkpoint is not None and checkpoint.step == 2 and changed == []
    assert (tmp_path / "run.1" / "checkpoints" / "step-000003").is_dir()
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (None, "is no checkpoint"),
        (lambda text: text, "has no position in data.train"),
        (lambda text: text.replace("3", "2", 1), r"is damaged \(it is not as it was written\)"),
        (lambda text: text.replace("crc32", "crc33"), "is damaged"),
        (lambda text: text[: len(text) // 2], "is damaged"),
        (lambda text: "[]", "is damaged"),
    ],
)
def test_what_cannot_be_resumed_is_refused_at_once(
    tmp_path: Path, change: Callable[[str], str] | None, message: str
) -> None:
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    if change:
        write_state(directory, 3, {})
        (directory / "state.json").write_text(change((directory / "state.json").read_text()))
    with pytest.raises(CheckpointError, match=message):
        prepare_run_dir(config(tmp_path, resume=str(directory)))
    with pytest.raises(CheckpointError, match="no directory"):
        prepare_run_dir(config(tmp_path, resume="/etc/passwd"))
