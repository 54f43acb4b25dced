"""Custom code that has changed between a run and its resume is reported, and nothing else is."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from slime_like.config import RunConfig
from slime_like.orchestration.run.custom_code import CustomCode
from slime_like.orchestration.run.milestones import Milestones
from slime_like.orchestration.run.opening import _restore
from slime_like.orchestration.trainer.checkpoint import Checkpoint, write_state

FIELDS: dict[str, dict[str, Any]] = {
    "reward.functions.1": {"reward": {"functions": [{"name": "math_verify"}, {"name": "NAME"}]}},
    "rollout.environment.name": {"rollout": {"environment": {"name": "NAME"}}},
    "rollout.agent.name": {"rollout": {"agent": {"name": "NAME"}}, "reward": {"functions": [{"name": "agent"}]}},
    "algorithm.loss": {"algorithm": {"loss": "NAME"}},
    "algorithm.advantage": {"algorithm": {"advantage": "NAME"}},
    "algorithm.kl_estimator": {"algorithm": {"kl_estimator": "NAME"}},
    "algorithm.importance_correction": {"algorithm": {"importance_correction": "NAME"}},
}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In a package: also ``reported.judge``. It must not be imported."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "reported").mkdir()
    (tmp_path / "reported" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (tmp_path / "reported" / "judge.py").write_text("raise RuntimeError('imported')\ndef f(): ...\n")
    return tmp_path / "reported" / "judge.py"


def config(root: Path, changes: dict[str, Any], **more: Any) -> RunConfig:
    return RunConfig.model_validate({"run_dir": root / "run", "model": {"path": root / "model"}, **changes, **more})


def named(settings: Any, name: str) -> Any:
    """The settings with this name of a function."""
    if isinstance(settings, dict):
        return {key: named(value, name) for key, value in settings.items()}
    if isinstance(settings, list):
        return [named(value, name) for value in settings]
    return name if settings == "NAME" else settings


def kept(code: CustomCode, directory: Path, step: int = 3) -> Checkpoint:
    """A checkpoint on disk, read back."""
    directory.mkdir(exist_ok=True)
    write_state(directory, step, {"data": {}, **code.state_dict()})
    return Checkpoint.read(directory)


@pytest.mark.parametrize("given", ["FILE:f", "reported.judge:f"])
@pytest.mark.parametrize("field", FIELDS)
def test_a_changed_source_is_named(tmp_path: Path, file: Path, field: str, given: str) -> None:
    settings = config(tmp_path, named(FIELDS[field], given.replace("FILE", str(file))))
    checkpoint = kept(CustomCode(settings), tmp_path / "step")
    assert list(CustomCode(settings).changes(checkpoint)) == []
    file.touch()  # other times, same content
    assert list(CustomCode(settings).changes(checkpoint)) == []
    file.write_text(file.read_text() + "# more\n")
    expected = [f"{field}: f ({file}): its source has changed since step 3"]
    resumed = CustomCode(settings)
    assert list(resumed.changes(checkpoint)) == expected
    assert list(resumed.changes(kept(resumed, tmp_path / "later", step=5))) == []  # said once
    assert not any(module.startswith("reported") for module in sys.modules)


def test_what_cannot_be_compared_is_not_reported(tmp_path: Path, file: Path) -> None:
    """A checkpoint of another version, another function in its place, built-in code, and a file that is gone (which a
    check before the start rejects)."""
    settings = config(tmp_path, named(FIELDS["reward.functions.1"], f"{file}:f"))
    write_state(tmp_path, 3, {"data": {}})
    assert list(CustomCode(settings).changes(Checkpoint.read(tmp_path))) == []
    checkpoint = kept(CustomCode(settings), tmp_path / "step")
    file.write_text("changed\n")
    assert len(list(CustomCode(settings).changes(checkpoint))) == 1
    others = named(FIELDS["reward.functions.1"], "math:sqrt"), named(FIELDS["reward.functions.1"], f"{file}:g"), {}
    for other in others:
        assert list(CustomCode(config(tmp_path, other)).changes(checkpoint)) == []
    file.unlink()
    assert list(CustomCode(settings).changes(checkpoint)) == []


@pytest.mark.parametrize("more", [{"algorithm": {"loss": "sft"}}, {"debug": {"load_rollouts": "kept"}}])
def test_rewards_of_a_run_that_computes_none_have_no_digest(tmp_path: Path, file: Path, more: dict[str, Any]) -> None:
    settings = named(FIELDS["reward.functions.1"], f"{file}:f")
    assert list(CustomCode(config(tmp_path, settings)).state_dict()["custom_code"]) == [f"{file}:f"]
    assert CustomCode(config(tmp_path, settings, **more)).state_dict() == {"custom_code": {}}


def test_a_run_keeps_them_in_its_checkpoints_and_notes_changes_as_it_resumes(tmp_path: Path, file: Path) -> None:
    """With stand-ins for what a run holds open."""
    settings = config(tmp_path, named(FIELDS["reward.functions.1"], f"{file}:f"), steps=2)
    saved: list[dict[str, Any]] = []
    notes: list[str] = []

    def run(code: CustomCode) -> Any:
        side = SimpleNamespace(
            state_dict=lambda: {"data": {}}, evaluate=lambda step, progress: None, restore=lambda checkpoint: None
        )
        progress = MagicMock(note=notes.append)
        reference = SimpleNamespace(state_dict=dict, restore=lambda checkpoint: None)
        store = MagicMock(start=lambda step, state: saved.append(state))
        store.commit_written.return_value = store.finish.return_value = None
        return SimpleNamespace(
            config=settings, rollout=side, reference=reference, custom_code=code, checkpoints=store, progress=progress,
            devices=MagicMock(), trainers=MagicMock(),
        )  # fmt: skip

    settings = settings.model_copy(
        update={"checkpoint": settings.checkpoint.model_copy(update={"async_save": True, "every": 1})}
    )
    Milestones(run(CustomCode(settings)), MagicMock()).after(1)
    (state,) = saved
    write_state(tmp_path, 1, state)
    checkpoint = Checkpoint.read(tmp_path)
    _restore(run(CustomCode(settings)), checkpoint)
    assert len(notes) == 1 and notes[0].startswith("resumed from ")
    file.write_text("changed\n")
    _restore(run(CustomCode(settings)), checkpoint)
    assert notes[2:] == [f"reward.functions.1: f ({file}): its source has changed since step 1"]
