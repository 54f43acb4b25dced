"""Runs of mixtures of experts that train with the engine's routes, killed and resumed."""

from pathlib import Path

import pytest

from slime_like.examples.tiny_model import make_tiny_model
from tests.conftest import Tiny
from tests.end_to_end.test_train import steps_of
from tests.support.processes import Command, succeed

EP2 = ["--trainer.parallel.data", "2", "--trainer.parallel.expert", "2"]
PP2 = ["--trainer.parallel.pipeline", "2"]
CASES: dict[str, list[str]] = {
    "qwen3_moe-pp2": PP2,
    "qwen3_moe-ep2": EP2,
    "deepseek_v3-ep2": EP2,
    "deepseek_v3-pp2": PP2,
}
QUICK = "deepseek_v3-pp2"
STEPS = 4


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case == QUICK else [pytest.mark.acceptance]) for case in CASES]
)
def test_a_run_with_the_engines_routes_is_killed_and_resumed(tiny: Tiny, tmp_path: Path, case: str) -> None:
    """In float32, logprobs of trainer and engine then differ by rounding only, in every step before and after."""
    family = case.partition("-")[0]
    make_tiny_model(tmp_path / "model", family=family, seed=0)
    run_dir = tmp_path / "run"
    flags = tiny.rl_flags(
        run_dir, "--model.path", str(tmp_path / "model"), "--model.dtype", "float32",
        "--rollout.engine", "sglang", "--trainer.optimizer.lr", "1e-3",
        "--algorithm.routing_replay", "rollout", "--algorithm.minibatches", "2",
        "--steps", str(STEPS), "--checkpoint.every", "2", "--evaluation.files", "[]", *CASES[case],
    )  # fmt: skip
    with Command(flags, tmp_path / "first") as command:
        command.wait_for("checkpoint of step 2", timeout_s=240)
        command.kill()
        assert command.finish(timeout_s=30).left_behind == []
    succeed(flags, tmp_path / "again")
    rows = {row["step"]: row for row in steps_of(run_dir)}
    assert sorted(rows) == list(range(1, STEPS + 1))
    for row in rows.values():
        assert 0 < row["train_actor_training/engine_gap_max"] < 1e-4
        assert 0 <= row["train_actor_training/routing_disagreement"] < 0.2
    succeed(["report", "--audit", str(run_dir)], tmp_path / "audit")
