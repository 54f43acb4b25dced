"""A reference that follows the policy: the same in workers and in trainers, and after a resume.

One run with reference workers, uninterrupted, is the measure. It is gone on with from the middle by another one, which
streams, and by one whose trainers hold the reference and train on the first run's kept rollouts alone: no engine, no
reward, no prompt.
"""

from pathlib import Path

import pytest

from tests.conftest import Tiny
from tests.end_to_end.test_train import steps_of
from tests.support.processes import run

STEPS, INTERVAL = 5, 2
SAME = ("loss", "kl_loss", "grad_norm", "num_tokens")


def test_resumed_equals_uninterrupted_wherever_the_reference_is(tiny: Tiny, tmp_path: Path) -> None:
    """The checkpoint of step 3 has the reference of step 2; a refresh follows after step 4."""

    def rows(name: str, *more: str) -> dict[int, dict[str, float]]:
        flags = [
            "--rollout.engine", "transformers", "--evaluation.files", "[]", "--checkpoint.export_hf", "false",
            "--steps", str(STEPS), "--checkpoint.every", "3", "--algorithm.kl_coef", "0.1",
            "--algorithm.minibatches", "1", "--reference.update_interval", str(INTERVAL),
            "--trainer.optimizer.lr", "1e-3", "--trainer.cpu_kernels", "off", *more,
        ]  # fmt: skip
        finished = run(tiny.rl_flags(tmp_path / name, *flags), tmp_path / f"{name}-log")
        assert finished.code == 0, finished.stderr
        return {int(row["step"]): row for row in steps_of(tmp_path / name)}

    workers = ["--reference.placement", "workers"]
    whole = rows("whole", *workers, "--debug.save_rollouts", str(tmp_path / "rollouts"))
    kl = {step: whole[step]["train_actor_training/kl_loss"] for step in range(1, STEPS + 1)}
    assert max(abs(kl[step]) for step in (1, 3, 5)) < 1e-9 < 1e-6 < min(kl[2], kl[4])  # just refreshed, or not
    resume = ["--resume", str(tmp_path / "whole" / "checkpoints" / "step-000003")]
    resumed = rows("workers", *workers, *resume, "--rollout.stream", "true")
    kept = ["--debug.load_rollouts", str(tmp_path / "rollouts"), "--data.train", "none", "--evaluation.files", "none"]
    in_trainers = rows("trainers", *kept, *resume)
    for found in (resumed, in_trainers):
        assert sorted(found) == [4, 5]
        for step in (4, 5):
            for name in SAME:
                key = f"train_actor_training/{name}"
                assert found[step][key] == pytest.approx(whole[step][key], rel=1e-4, abs=1e-6), (step, name)
    for step in (4, 5):  # the same samples on the same weights have the same loss
        loss = "train_actor_training/loss"
        assert in_trainers[step][loss] == pytest.approx(whole[step][loss], abs=1e-6), step
