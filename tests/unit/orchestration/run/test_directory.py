"""What a run finds in its directory and leaves there."""

import errno
import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from slime_like.config import RunConfig
from slime_like.config.reading.load import load_config
from slime_like.errors import DONE, CheckpointError, ConfigError, RunFinishedError, SlimeLikeError, exit_code
from slime_like.models.weight_files import fingerprint
from slime_like.orchestration.run.directory import SUMMARY_FILE, RunDirectory
from slime_like.orchestration.run.lock import RunLock
from slime_like.orchestration.trainer.checkpoint import Checkpoint, write_state
from tests.support.rejections import Rejects


def config(root: Path, **changes: Any) -> RunConfig:
    return RunConfig.model_validate({"run_dir": root / "run", "model": {"path": root / "model"}, "steps": 5, **changes})


def find_checkpoint(config: RunConfig) -> Checkpoint | None:
    return RunDirectory(config).find_checkpoint()


def prepare_run_dir(config: RunConfig) -> tuple[Checkpoint | None, list[str]]:
    """Do everything that a start does with the directory. Return the checkpoint and the changed settings."""
    with RunLock(config.run_dir) as lock:
        directory = RunDirectory(config)
        checkpoint = directory.find_checkpoint()
        directory.make(checkpoint, lock)
        return checkpoint, directory.record_settings(checkpoint) if checkpoint is not None else []


def write_checkpoint(run_dir: Path, step: int, **state: Any) -> Path:
    directory = run_dir / "checkpoints" / f"step-{step:06d}"
    directory.mkdir(parents=True)
    write_state(directory, step, {"data": {}, **state})
    latest = run_dir / "checkpoints" / "latest"
    latest.unlink(missing_ok=True)
    latest.symlink_to(directory.name)
    (run_dir / "metrics.jsonl").write_text("{}\n")
    return directory


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Directory of a run that ended after its checkpoint of step 3."""
    prepare_run_dir(config(tmp_path))
    write_checkpoint(tmp_path / "run", 3)
    return tmp_path / "run"


def test_a_new_run_saves_its_configuration(tmp_path: Path) -> None:
    """An empty export directory is no obstacle."""
    (tmp_path / "run" / "hf").mkdir(parents=True)
    assert prepare_run_dir(config(tmp_path)) == (None, [])
    assert load_config(tmp_path / "run" / "config.yaml", []) == config(tmp_path)


@pytest.mark.parametrize("name", ["config.yaml", "driver.log", "tables", "checkpoints", "ledger.sqlite", "reference"])
def test_files_of_the_user_are_not_overwritten(tmp_path: Path, name: str) -> None:
    """For example, ``run_dir: .`` may hold the configuration."""
    mine = tmp_path / "run" / name
    (mine if "." in name else mine / "mine").mkdir(parents=True)
    if "." in name:
        mine.rmdir()
        mine.write_text("precious: true\n")
    with pytest.raises(ConfigError, match=rf"would overwrite files there that no earlier run wrote \({name}\)"):
        prepare_run_dir(config(tmp_path))
    assert [path.name for path in mine.parent.iterdir()] == [name]
    assert not mine.is_file() or mine.read_text() == "precious: true\n"


def test_a_rejected_run_leaves_no_new_directory(tmp_path: Path) -> None:
    with RunLock(tmp_path / "deep" / "run"), RunLock(tmp_path / "other"):
        (tmp_path / "other" / "note").touch()
    assert not (tmp_path / "deep" / "run").exists() and (tmp_path / "other" / "note").exists()
    (tmp_path / "run").mkdir()
    with RunLock(tmp_path / "run"):
        pass
    assert (tmp_path / "run").exists()


def test_changed_settings_are_reported_and_the_old_ones_kept(tmp_path: Path, run_dir: Path) -> None:
    """The run resumes from step 3 twice. Steps up to 3 are the original run's."""
    checkpoint, changed = prepare_run_dir(config(tmp_path, algorithm={"kl": {"coef": 0.5}}, steps=9))
    assert checkpoint is not None and checkpoint.step == 3
    assert changed == ["steps: 5 -> 9", "algorithm.kl.coef: 0.0 -> 0.5"]
    assert load_config(run_dir / "config.yaml", []).algorithm.kl.coef == 0.5
    assert load_config(run_dir / "config.until-step-000003.yaml", []) == config(tmp_path)
    assert prepare_run_dir(config(tmp_path, algorithm={"kl": {"coef": 0.5}}, steps=9))[1] == []
    _, changed = prepare_run_dir(config(tmp_path, algorithm={"kl": {"coef": 0.7}}, steps=9))
    assert changed == ["algorithm.kl.coef: 0.5 -> 0.7"]
    assert load_config(run_dir / "config.until-step-000003.yaml", []) == config(tmp_path)
    assert load_config(run_dir / "config.yaml", []).algorithm.kl.coef == 0.7


def test_accuracies_are_comparable_if_the_same_was_measured(tmp_path: Path, run_dir: Path) -> None:
    """Another first reward function or other data settings matter; reward weights and training settings do not."""
    second = {"name": "length", "options": {"target": 9}, "weight": 0.5}
    same = {"functions": [{"name": "math_verify", "weight": 2.0}, second]}
    settings = config(tmp_path, reward=same, algorithm={"kl": {"coef": 0.5}}, data={"train": [tmp_path / "a.jsonl"]})
    prepare_run_dir(settings)
    assert RunDirectory(settings).measured_otherwise_until() == 0
    write_checkpoint(run_dir, 4)
    settings = config(tmp_path, reward={"functions": [second]})
    prepare_run_dir(settings)
    assert RunDirectory(settings).measured_otherwise_until() == 4
    assert RunDirectory(config(tmp_path, evaluation={"max_prompts": None})).measured_otherwise_until() == 0
    for other in ({"evaluation": {"temperature": 1.0}}, {"data": {"prompt_key": "q"}}):
        assert RunDirectory(config(tmp_path, **other)).measured_otherwise_until() == 4


def test_a_rejected_start_changes_nothing(tmp_path: Path, run_dir: Path) -> None:
    """For example, data may be rejected after the checkpoint is found and before the settings are recorded."""
    before = sorted(path.name for path in run_dir.iterdir())
    with RunLock(run_dir) as lock:
        refused = RunDirectory(config(tmp_path, algorithm={"kl": {"coef": 0.5}}))
        refused.make(refused.find_checkpoint(), lock)
    assert sorted(path.name for path in run_dir.iterdir()) == before
    assert prepare_run_dir(config(tmp_path))[1] == []


def test_a_file_system_without_locks_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    with RunLock(tmp_path / "run") as lock:
        assert lock.warning is not None and "has no file locks (No locks available)" in lock.warning


def test_a_directory_that_cannot_be_moved_is_rejected(
    tmp_path: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch, rejects: Rejects
) -> None:
    """For example, a mount point."""
    monkeypatch.setattr(Path, "rename", Mock(side_effect=OSError(errno.EBUSY, "Device or resource busy")))
    with rejects(SlimeLikeError, "run-dir-not-moved"):
        prepare_run_dir(config(tmp_path, resume="never"))


def test_inputs_of_a_run_are_not_moved_aside(tmp_path: Path, run_dir: Path) -> None:
    """For example, the model may be the export of the earlier run in the same directory."""
    link = tmp_path / "link"
    link.symlink_to(run_dir)
    given = {"model": {"path": link / "hf"}, "data": {"train": [tmp_path / "a.jsonl", run_dir / "b.jsonl"]}}
    with pytest.raises(ConfigError) as refused:
        prepare_run_dir(config(tmp_path, resume="never", **given))
    named = [str(found).partition(f": inside run_dir={run_dir}, which")[0] for found in refused.value.problems]
    assert named == [f"model.path={link / 'hf'}", f"data.train={run_dir / 'b.jsonl'}"]
    assert (run_dir / "metrics.jsonl").exists() and not (tmp_path / "run.1").exists()
    assert prepare_run_dir(config(tmp_path, **given))[0] is not None  # resumed: nothing is moved


@pytest.mark.parametrize("there", ["file", "notes", "model", "lost link"])
def test_the_export_replaces_nothing_of_the_user(tmp_path: Path, there: str) -> None:
    export = tmp_path / "run" / "hf"
    export.parent.mkdir()
    if there in ("notes", "model"):
        export.mkdir()
        (export / {"notes": "mine.txt", "model": "config.json"}[there]).write_text("{}")
    elif there == "file":
        export.write_text("mine")
    else:
        export.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"run/hf is not a model that this run wrote, .*; move it away"):
        prepare_run_dir(config(tmp_path))
    assert [path.name for path in export.parent.iterdir()] == ["hf"]
    prepare_run_dir(config(tmp_path, checkpoint={"export_hf": False}))
    write_checkpoint(export.parent, 3)
    if there == "model":  # apparently of an earlier start
        assert prepare_run_dir(config(tmp_path))[0] is not None
    else:
        with pytest.raises(ConfigError, match="is not a model that this run wrote"):
            prepare_run_dir(config(tmp_path))
    with pytest.raises(ConfigError, match=r"run/hf is model.path, but"):
        prepare_run_dir(config(tmp_path, model={"path": export}))
    (export.parent / "encoded_rows").mkdir()
    prepare_run_dir(config(tmp_path, resume="never"))  # moved aside with the rest, but for the cache
    assert (export.parent / "encoded_rows").is_dir() and not (tmp_path / "run.1" / "encoded_rows").exists()
    assert not os.path.lexists(export) and os.path.lexists(tmp_path / "run.1" / "hf")


def test_a_copy_without_links_resumes_from_the_highest_step(tmp_path: Path, run_dir: Path) -> None:
    """Object stores have no links, and training must not silently start over."""
    copied = write_checkpoint(run_dir, 2)
    (copied.parent / "latest").unlink()
    shutil.copytree(copied, copied.parent / "latest")
    checkpoint, _ = prepare_run_dir(config(tmp_path))
    assert checkpoint is not None and checkpoint.step == 3
    assert not (tmp_path / "run.1").exists()


def test_a_path_without_a_checkpoint_is_rejected(tmp_path: Path, run_dir: Path, rejects: Rejects) -> None:
    """The path is a file or any directory, or the only checkpoint has lost its state or is gone."""
    for path in ("/etc/passwd", "/etc"):
        with rejects(CheckpointError, "no-checkpoint"):
            prepare_run_dir(config(tmp_path, resume=path))
    directory = run_dir / "checkpoints" / "step-000003"
    (directory / "state.json").unlink()
    with rejects(ConfigError, "no-whole-checkpoint"):  # the same start would find the same
        find_checkpoint(config(tmp_path))
    shutil.rmtree(directory)
    with rejects(ConfigError, "no-whole-checkpoint"):
        find_checkpoint(config(tmp_path))


@pytest.mark.parametrize("damage", ["empty state", "zeros", "no state", "gone", "short file", "ledger"])
def test_auto_resumes_from_the_newest_whole_one(tmp_path: Path, run_dir: Path, damage: str) -> None:
    """Steps of the same run come first. A path given by the user is never replaced."""
    write_checkpoint(run_dir, 9)
    path = write_checkpoint(run_dir, 4, lengths={"weights": 8}, files={"ledger": 0})
    (path / "weights").write_bytes(b"8 bytes!")
    (path / "ledger").touch()
    sound = find_checkpoint(config(tmp_path))
    assert sound is not None and (sound.step, sound.passed_over) == (4, "")
    match damage:
        case "empty state" | "zeros":
            (path / "state.json").write_bytes(bytes(0 if damage == "empty state" else 40))
        case "no state":
            (path / "state.json").unlink()
        case "gone":
            shutil.rmtree(path)
        case "short file":
            (path / "weights").write_bytes(b"8 by")
        case "ledger":
            (path / "ledger").write_bytes(b"?")
    found = find_checkpoint(config(tmp_path))
    assert found is not None and found.step == 3
    assert str(run_dir / "checkpoints") in found.passed_over and f"resuming from {found.path}" in found.passed_over
    with pytest.raises(CheckpointError):
        find_checkpoint(config(tmp_path, resume=str(path)))


def test_a_model_with_other_weights_is_rejected(tmp_path: Path, run_dir: Path, rejects: Rejects) -> None:
    """A copy is accepted. Other weights have the same length and the same beginning and end."""
    weights, other = bytes(2**20), bytes(2**18) + b"1" * 2**19 + bytes(2**18)
    for name, content in {"model": weights, "copy": weights, "other": other}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(content)
    write_checkpoint(run_dir, 4, model=fingerprint(tmp_path / "model"))
    for name in ("model", "copy"):
        assert find_checkpoint(config(tmp_path, model={"path": tmp_path / name})) is not None
    with rejects(ConfigError, "resume-of-another-model"):
        find_checkpoint(config(tmp_path, model={"path": tmp_path / "other"}))


def test_a_finished_run_has_nothing_left_to_do(tmp_path: Path, rejects: Rejects) -> None:
    """A run that was killed between its last checkpoint and its last file may still finish."""
    prepare_run_dir(config(tmp_path))
    write_checkpoint(tmp_path / "run", 5)
    assert prepare_run_dir(config(tmp_path))[0] is not None
    (tmp_path / "run" / SUMMARY_FILE).touch()
    with rejects(RunFinishedError, "run-finished") as caught:
        prepare_run_dir(config(tmp_path))
    assert isinstance(caught.value, SlimeLikeError) and exit_code(caught.value) == DONE
    assert prepare_run_dir(config(tmp_path, steps=6))[0] is not None


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({"decay": "linear"}, {"decay": "linear", "steps": 6}),
        ({}, {"lr": 2e-5}),
        ({}, {"final_weight_decay": 0.5}),
        ({"warmup_steps": 1}, {}),
    ],
)
def test_another_schedule_is_rejected_before_trainers_start(
    tmp_path: Path, rejects: Rejects, before: dict[str, Any], now: dict[str, Any]
) -> None:
    def scheduled(steps: int = 5, **optimizer: Any) -> RunConfig:
        return config(tmp_path, steps=steps, trainer={"optimizer": optimizer})

    prepare_run_dir(scheduled(**before))
    write_checkpoint(tmp_path / "run", 5)
    with rejects(ConfigError, "config"):
        find_checkpoint(scheduled(**now))
    assert find_checkpoint(scheduled(**before)) is not None
    for accepted in (("schedule",), ("data", "schedule")):
        changed = scheduled(**now)
        update = {"checkpoint": changed.checkpoint.model_copy(update={"override": accepted})}
        assert find_checkpoint(changed.model_copy(update=update)) is not None
    (tmp_path / "run" / SUMMARY_FILE).touch()
    with rejects(RunFinishedError, "run-finished"):
        find_checkpoint(scheduled(**before))


@pytest.mark.parametrize("resume", ["auto", "path"])
def test_a_checkpoint_of_another_backend_is_rejected(tmp_path: Path, resume: str) -> None:
    path = write_checkpoint(tmp_path / "run", 3, backend="fsdp")
    given = config(tmp_path, resume="auto" if resume == "auto" else str(path))
    said = r"resume=.*step-000003 was written by fsdp, .*megatron cannot read it; set trainer.backend=fsdp"
    with pytest.raises(ConfigError, match=said):
        find_checkpoint(given)
    fsdp = given.model_copy(update={"trainer": given.trainer.model_copy(update={"backend": "fsdp"})})
    assert find_checkpoint(fsdp) is not None
    write_checkpoint(tmp_path / "older", 3)  # without a name, the trainers check it themselves
    assert find_checkpoint(config(tmp_path, resume=str(tmp_path / "older" / "checkpoints" / "latest"))) is not None


def test_another_runs_checkpoint_moves_the_run_in_the_directory_aside(tmp_path: Path, run_dir: Path) -> None:
    other = write_checkpoint(tmp_path / "other", 2)
    checkpoint, changed = prepare_run_dir(config(tmp_path, resume=str(other)))
    assert checkpoint is not None and checkpoint.step == 2 and changed == []
    assert (tmp_path / "run.1" / "checkpoints" / "step-000003").is_dir()
    assert not (run_dir / "checkpoints").exists()


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda text: text, "no-data-position"),
        (lambda text: text.replace("3", "2", 1), "checkpoint-damaged"),
        (lambda text: text.replace("crc32", "crc33"), "checkpoint-damaged"),
        (lambda text: text[: len(text) // 2], "checkpoint-damaged"),
        (lambda text: "[]", "checkpoint-damaged"),
    ],
)
def test_a_damaged_state_is_rejected(tmp_path: Path, change: Callable[[str], str], code: str, rejects: Rejects) -> None:
    write_state(tmp_path, 3, {})
    (tmp_path / "state.json").write_text(change((tmp_path / "state.json").read_text()))
    with rejects(CheckpointError, code):
        prepare_run_dir(config(tmp_path, resume=str(tmp_path)))
