"""Runs of mixtures of experts that train with the engine's routes, and are resumed."""

from pathlib import Path

import pytest

from slime_like.data.ledger import audit_run
from slime_like.examples.tiny_model import make_tiny_model
from tests.conftest import Tiny
from tests.end_to_end.test_train import steps_of
from tests.support.acceptance import some_in_acceptance
from tests.support.shared_cluster import train_together

EP2 = ["--trainer.parallel.data", "2", "--trainer.parallel.expert", "2"]
PP2 = ["--trainer.parallel.pipeline", "2"]
CASES: dict[str, list[str]] = {
    "transformers-qwen3_moe-pp2": PP2,
    "sglang-qwen3_moe-ep2": EP2,
    "sglang-deepseek_v3-ep2": EP2,
    "sglang-deepseek_v3-pp2": PP2,
}
QUICK = "transformers-qwen3_moe-pp2"
STEPS = 4


@pytest.mark.parametrize("case", some_in_acceptance(CASES, lambda case: case != QUICK))
def test_a_run_with_the_engines_routes_and_its_resumption(tiny: Tiny, tmp_path: Path, case: str) -> None:
    """In float32, logprobs of trainer and engine then differ by rounding only, in every step before and after."""
    engine, family, _ = case.split("-")
    make_tiny_model(tmp_path / "model", family=family, seed=0)
    run_dir = tmp_path / "run"
    flags = tiny.rl_flags(
        run_dir, "--model.path", str(tmp_path / "model"), "--model.dtype", "float32",
        "--rollout.engine", engine, "--trainer.optimizer.lr", "1e-3",
        "--algorithm.routing_replay", "rollout", "--algorithm.minibatches", "2",
        "--evaluation.files", "[]", *CASES[case],
    )  # fmt: skip
    train_together([[*flags, "--steps", str(steps)] for steps in (2, STEPS)], tmp_path)
    rows = {row["step"]: row for row in steps_of(run_dir)}
    assert sorted(rows) == list(range(1, STEPS + 1))
    for row in rows.values():
        assert 0 < row["train_actor_training/engine_gap_max"] < 1e-4
        assert 0 <= row["train_actor_training/routing_disagreement"] < 0.2
    assert not audit_run(run_dir).problems
