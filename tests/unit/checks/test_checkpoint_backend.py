"""Whose files a checkpoint holds, as far as it says so."""

from pathlib import Path

from slime_like.checks.check import check
from slime_like.checks.checkpoint_backend import backend_problem
from slime_like.checks.needs import CONVERSION
from slime_like.config import RunConfig
from tests.unit.checks.checkpoint import write_checkpoint


def test_weights_of_another_backend_are_refused_by_name(tmp_path: Path) -> None:
    weights = tmp_path / "converted"
    (weights / "trainer").mkdir(parents=True)
    (weights / "conversion.json").write_text('{"format": 1}')
    model = {"path": write_checkpoint(tmp_path / "model"), "weights": weights}
    for backend, expected in (("megatron", 0), ("fsdp", 1)):
        problems = check(RunConfig(run_dir=tmp_path, model=model, trainer={"backend": backend}), CONVERSION)
        assert len([problem for problem in problems if "was written by megatron" in problem]) == expected
        assert all(problem.startswith(f"model.weights={weights}") for problem in problems)


def test_a_training_checkpoint_as_a_model_is_told_what_it_is(tmp_path: Path) -> None:
    weights = tmp_path / "step-1"
    (weights / "trainer").mkdir(parents=True)
    (weights / "state.json").write_text("{}")
    for path in (weights, weights / "trainer"):
        (problem,) = check(RunConfig(run_dir=tmp_path, model={"path": path}), CONVERSION)
        assert problem.startswith(f"model.path={path} is a training checkpoint already; give the Hugging Face ")
        assert f"{weights} as model.weights" in problem
    (weights / "config.json").write_text("{}")
    problems = check(RunConfig(run_dir=tmp_path, model={"path": weights}), CONVERSION)
    assert problems and not any("already" in problem for problem in problems)


def test_a_checkpoint_that_does_not_say_who_wrote_it_is_believed(tmp_path: Path) -> None:
    for state in (None, "{", "[]", '{"step": 1}', '{"backend": 3}'):
        if state is not None:
            (tmp_path / "state.json").write_text(state)
        assert backend_problem(tmp_path, "fsdp", "resume") is None
