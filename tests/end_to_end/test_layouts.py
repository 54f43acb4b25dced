"""Whole runs under parallel layouts and with the other trainer give the results of one Megatron rank."""

import json
from pathlib import Path

import pytest
import torch
import yaml

from slime_like.data.dump import dump_path, load_trajectories
from slime_like.observability.report.data import read_run
from tests.conftest import Tiny
from tests.end_to_end.test_train import steps_of
from tests.support.shared_cluster import replay_together, train_together

SAME = ("loss", "policy_loss", "kl_loss", "entropy", "grad_norm", "num_tokens")
FOUR = (
    "--trainer.parallel.pipeline", "2", "--trainer.parallel.context", "2",
    # Two stages send only changes to two engines over a network.
    "--sync.transport", "gloo", "--sync.delta", "always", "--rollout.num_engines", "2",
)  # fmt: skip
EIGHT = (*FOUR, "--trainer.parallel.tensor", "2", "--trainer.parallel.sequence", "true")
LAYOUTS = {
    "one rank": (),
    "four ranks, two axes": FOUR,
    "fsdp on two ranks": ("--trainer.backend", "fsdp", "--trainer.parallel.data", "2"),
    "colocated": (
        "--trainer.parallel.data", "2", "--rollout.num_engines", "2", "--cluster.placement", "colocated",
        "--sync.transport", "colocated", "--trainer.recompute", "auto",
    ),
}  # fmt: skip


def flags(tiny: Tiny, root: Path, *layout: str) -> list[str]:
    return tiny.rl_flags(
        root / "run", "--rollout.engine", "transformers", "--algorithm.kl.coef", "0.01", "--checkpoint.every", "1",
        "--algorithm.minibatches", "2", "--algorithm.epochs", "2",
        "--evaluation.every", "1", "--trainer.target_tokens_per_batch", "256",
        # AdamW's first step is the gradient's sign. If rounding decides it, weights differ by twice the rate, and one
        # sample in ten thousand changes.
        "--trainer.optimizer.eps", "1e-3",
        "--debug.save_rollouts", str(root / "rollouts"), "--debug.capsule", "[2]", *layout,
    )  # fmt: skip


@pytest.fixture(scope="module")
def runs(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    train_together([flags(tiny, root / name, *layout) for name, layout in LAYOUTS.items()], root)
    return root


@pytest.fixture(scope="module")
def one_rank(runs: Path) -> Path:
    return runs / "one rank"


@pytest.mark.parametrize("layout", [*LAYOUTS][1:])
def test_a_layout_does_what_one_rank_does(runs: Path, one_rank: Path, layout: str) -> None:
    check_same(runs / layout / "run", one_rank)


@pytest.mark.acceptance
def test_eight_ranks_on_three_axes_do_what_one_rank_does(tiny: Tiny, one_rank: Path, tmp_path: Path) -> None:
    train_together([flags(tiny, tmp_path, *EIGHT)], tmp_path)
    check_same(tmp_path / "run", one_rank)


def check_same(run_dir: Path, one_rank: Path) -> None:
    """Require the same samples and metrics. The run itself verifies its syncs."""
    assert yaml.safe_load((run_dir / "config.yaml").read_text())["trainer"]["recompute"] == "none"
    for step in (1, 2):
        ours, theirs = (load_trajectories(dump_path(root / "rollouts", step)) for root in (run_dir.parent, one_rank))
        assert [t.sequence_id for t in ours] == [t.sequence_id for t in theirs]
        assert all(torch.equal(a.response_tokens, b.response_tokens) for a, b in zip(ours, theirs, strict=True))
    for row, expected in zip(steps_of(run_dir), steps_of(one_rank / "run"), strict=True):
        assert row["weights/probe_gap"] < 1e-4
        assert row["train_actor_training/engine_gap_max"] < 1e-4
        for name in SAME:
            key = f"train_actor_training/{name}"
            assert row[key] == pytest.approx(expected[key], rel=1e-4, abs=1e-6), name


def test_a_capsule_is_replayed_bit_for_bit_and_under_other_layouts(runs: Path, tmp_path: Path) -> None:
    """The checkpoint of step 1 is in the capsule, so the replay trains one step of four updates."""
    capsule = "run/capsules/step-000002"
    cases = {
        "same": [runs / "one rank" / capsule],
        "tensor": [runs / "one rank" / capsule, "--trainer.parallel.tensor", "2"],
        "fsdp": [runs / "fsdp on two ranks" / capsule, "--trainer.parallel.data", "1"],
    }
    replays = [[*case, "--output", str(tmp_path / name)] for name, case in cases.items()]
    assert replay_together([list(map(str, each)) for each in replays], tmp_path) == [0, 0, 0]
    found = {name: json.loads((tmp_path / name).read_text())["lines"] for name in cases}
    for name, lines in found.items():
        quantities = [line["quantity"] for line in lines]
        assert quantities[:2] == ["trainer weights", "given advantages"]
        assert {"old_logprobs", "ref_logprobs", "policy figures", "after.old_logprobs"} <= set(quantities)
        assert all(line["largest"] == 0 for line in lines) == (name == "same")
        assert lines[0]["largest"] == 0  # a checkpoint has the same bytes under every layout
    assert read_run(runs / "one rank" / "run").capsules == ("capsules/step-000002",)


def test_ratio_and_clip_fraction_are_real_from_the_second_update_on(one_rank: Path) -> None:
    """With two epochs of two minibatches, the first update's ratio is 1, so later updates move the mean."""
    rows = steps_of(one_rank / "run")
    assert all(row["train_actor_training/old_gap_max"] < 1e-6 for row in rows)
    assert any(abs(row["train_actor_training/ratios"] - 1) > 1e-4 for row in rows)
    assert any(row["train_actor_training/clipfrac"] > 0 for row in rows)
