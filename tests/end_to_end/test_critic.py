"""Runs with a critic: PPO."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.conftest import Tiny
from tests.end_to_end.test_train import metrics_of
from tests.support.acceptance import some_in_acceptance
from tests.support.shared_cluster import train_together

PPO = ["--algorithm.advantage", "{name: gae, lam: 0.9}", "--critic.optimizer.lr", "1e-2", "--evaluation.files", "[]"]
PPO += ["--rollout.engine", "transformers", "--algorithm.minibatches", "1", "--critic.warmup_steps", "1"]
CASES: dict[str, list[str]] = {
    "shared": ["--algorithm.kl_reward.coef", "0.05"],
    "separate": ["--critic.placement", "separate", "--critic.parallel.data", "2", "--trainer.backend", "fsdp"],
}


@pytest.mark.parametrize("case", some_in_acceptance(CASES, lambda case: case == "separate"))
def test_a_run_trains_both_models_and_resumes(tiny: Tiny, tmp_path: Path, case: str) -> None:
    """The first step leaves the policy as it is. A resumed run continues bit by bit."""
    flags = [*PPO, *CASES[case], "--checkpoint.every", "2", "--checkpoint.keep", "9"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    resume = ["--resume", str(whole / "checkpoints" / "step-000002")]
    runs = [tiny.rl_flags(path, *flags, "--steps", "4", *more) for path, more in ((whole, []), (cut, resume))]
    train_together(runs, tmp_path)
    rows = [row for row in metrics_of(whole) if "train_critic/loss" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert "train_actor_training/loss" not in rows[0] and "train_actor_training/loss" in rows[1]
    assert all(row["train_critic/loss"] > 0 and row["train_critic/old_gap_max"] < 1e-5 for row in rows)
    assert load_file(whole / "critic_hf" / "model.safetensors")["score.weight"].any()
    assert rows[0]["train_critic/values"] == 0 and rows[3]["train_critic/values"] != 0
    if case == "shared":
        assert all("train_actor_training/kl_reward" in row for row in rows)
    resumed = [row for row in metrics_of(cut) if "train_critic/loss" in row]
    for name in ("train_critic/loss", "train_critic/values", "train_actor_training/loss"):
        assert resumed[-1][name] == rows[3][name]
