"""A run that is killed and started again ends as one that was not: same samples, same figures."""

import shutil
import time
from pathlib import Path

import pytest
import torch

from slime_like.data.dump import dump_path, load_trajectories
from tests.conftest import Tiny
from tests.end_to_end.test_train import steps_of
from tests.support.processes import Command, run

STEPS = 6
SAME = ("loss", "policy_loss", "kl_loss", "ratios", "entropy", "grad_norm", "num_tokens")


def flags(tiny: Tiny, root: Path, *more: str) -> list[str]:
    """The transformers engine: it starts at once, and these tests are about everything around it."""
    return tiny.rl_flags(
        root / "run", "--rollout.engine", "transformers", "--steps", str(STEPS), "--checkpoint.every", "2",
        "--algorithm.minibatches", "2", "--algorithm.epochs", "2", "--algorithm.kl_coef", "0.01",
        "--trainer.cpu_kernels", "off", "--debug.save_rollouts", str(root / "rollouts"), *more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def uninterrupted(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("whole")
    finished = run(flags(tiny, root), root / "log")
    assert finished.code == 0, finished.stderr
    return root


def assert_same(root: Path, whole: Path) -> None:
    for step in range(1, STEPS + 1):
        ours, theirs = (load_trajectories(dump_path(r / "rollouts", step)) for r in (root, whole))
        assert [t.sequence_id for t in ours] == [t.sequence_id for t in theirs]
        assert all(torch.equal(a.response_tokens, b.response_tokens) for a, b in zip(ours, theirs, strict=True))
    expected = {row["step"]: row for row in steps_of(whole / "run")}
    rows = steps_of(root / "run")  # a step run again is there again
    assert {row["step"] for row in rows} == set(range(1, STEPS + 1)) == set(expected)
    for row in rows:
        for name in SAME:
            key = f"train_actor_training/{name}"
            assert row[key] == pytest.approx(expected[row["step"]][key], abs=1e-6), (row["step"], name)


def test_killed_twice_and_resumed_equals_uninterrupted(tiny: Tiny, tmp_path: Path, uninterrupted: Path) -> None:
    """Killed during step 3, the checkpoint of step 2 is the last, so step 3 is run again. Killed in step 5, before the
    save of step 4, which is written behind training, counts: once more it goes on after step 2, and ends the same."""
    checkpoints = tmp_path / "run" / "checkpoints"
    with Command(flags(tiny, tmp_path), tmp_path / "log") as command:
        command.wait_for("checkpoint of step 2", timeout_s=120)
        command.kill()
        killed = command.finish(timeout_s=30)
    assert killed.code == -9 and killed.left_behind == []
    behind = ["--checkpoint.async_save", "true"]
    with Command(flags(tiny, tmp_path, *behind), tmp_path / "log-again") as command:
        started, deadline = checkpoints / ".partial-step-000004" / "trainer", time.monotonic() + 120
        while not started.is_dir():
            assert command.process.poll() is None and time.monotonic() < deadline, command.output
            time.sleep(0.002)
        command.kill()
        killed = command.finish(timeout_s=30)
    assert killed.code == -9 and killed.left_behind == []
    assert "step-000002 after step 2" in killed.stderr and "checkpoint of step 4" not in killed.stderr
    finished = run(flags(tiny, tmp_path, *behind), tmp_path / "log-last")
    assert finished.code == 0, finished.stderr
    assert "step-000002 after step 2" in finished.stderr
    assert [row["step"] for row in steps_of(tmp_path / "run")].count(3) >= 2  # with either start
    assert_same(tmp_path, uninterrupted)
    assert (checkpoints / "latest").readlink() == Path("step-000006") and not list(checkpoints.glob(".partial*"))


def test_ratio_and_clip_fraction_are_real_from_the_second_update_on(uninterrupted: Path) -> None:
    """Two epochs of two minibatches: the first update's ratio is 1, so a mean that moves comes from later ones."""
    rows = steps_of(uninterrupted / "run")
    assert all(row["train_actor_training/old_gap_max"] < 1e-6 for row in rows)
    assert any(abs(row["train_actor_training/ratios"] - 1) > 1e-4 for row in rows)
    assert any(row["train_actor_training/clipfrac"] > 0 for row in rows)


def test_a_finished_run_is_left_alone(tiny: Tiny, tmp_path: Path, uninterrupted: Path) -> None:
    """Started again it is rejected, before anything starts and with its record as it was."""
    before = (uninterrupted / "run" / "config.yaml").read_text()
    again = run(flags(tiny, uninterrupted, "--algorithm.kl_coef", "0.5"), tmp_path / "log", timeout_s=60)
    assert again.code == 2
    assert f"steps={STEPS}: the run in" in again.stderr and f"has finished {STEPS} steps" in again.stderr
    assert (uninterrupted / "run" / "config.yaml").read_text() == before


def test_resume_never_moves_the_earlier_run_aside(tiny: Tiny, trained: Path, tmp_path: Path) -> None:
    shutil.copytree(trained, tmp_path / "run", symlinks=True)
    finished = run(tiny.sft_flags(tmp_path / "run", "--steps", "1", "--resume", "never"), tmp_path / "log")
    assert finished.code == 0, finished.stderr
    assert [row["step"] for row in steps_of(tmp_path / "run")] == [1]
    assert [row["step"] for row in steps_of(tmp_path / "run.1")] == [1, 2]
