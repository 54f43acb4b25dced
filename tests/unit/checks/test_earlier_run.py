"""Whose files a checkpoint holds, as far as it says so."""

from pathlib import Path

from slime_like.checks.check import require_valid
from slime_like.checks.definition import CONVERSION
from slime_like.checks.earlier_run import backend_problem
from slime_like.config import RunConfig
from slime_like.errors import ConfigError
from tests.support.rejections import Rejects


def test_a_training_checkpoint_as_a_model_is_named(tmp_path: Path, rejects: Rejects) -> None:
    weights = tmp_path / "step-1"
    (weights / "trainer").mkdir(parents=True)
    for path, name in ((weights, "state.json"), (weights / "trainer", "state.json"), (weights, "config.json")):
        (weights / name).write_text("{}")
        with rejects(ConfigError, "model.path"):
            require_valid(RunConfig(run_dir=tmp_path, model={"path": path}), CONVERSION)


def test_a_checkpoint_that_does_not_say_who_wrote_it_is_believed(tmp_path: Path) -> None:
    for state in (None, "{", "[]", '{"step": 1}', '{"backend": 3}'):
        if state is not None:
            (tmp_path / "state.json").write_text(state)
        assert backend_problem(tmp_path, "fsdp", "resume") is None
