"""Sampling beside training, groups that are left out: staleness is bounded, and the ledger accounts for every group."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from slime_like.data.ledger import audit_run
from tests.conftest import Tiny
from tests.processes import Command, run


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    rows = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if "train_actor_training/loss" in row]


def test_sampling_runs_ahead_within_its_bound_also_over_a_kill(tiny: Tiny, tmp_path: Path) -> None:
    """The engine gets new weights in the middle of responses, two trainer ranks get samples as they come. Killed and
    resumed: what was in flight is issued again."""
    run_dir, bound = tmp_path / "run", 2
    flags = tiny.rl_flags(
        run_dir, "--steps", "10", "--rollout.max_staleness", str(bound), "--checkpoint.every", "2",
        "--rollout.engine", "transformers",
        "--algorithm.importance_correction", "truncate", "--algorithm.minibatches", "1", "--evaluation.files", "[]",
        "--rollout.stream", "true", "--trainer.target_tokens_per_batch", "64", "--trainer.parallel.data", "2",
    )  # fmt: skip
    with Command(flags, tmp_path / "log-0") as command:
        command.wait_for("checkpoint of step 4", timeout_s=200)
        time.sleep(0.3)  # into the steps after it
        command.kill()
        killed = command.finish(timeout_s=60)
    assert killed.code != 0 and killed.left_behind == []
    finished = run(flags, tmp_path / "log-1")
    assert finished.code == 0, finished.stderr
    assert finished.left_behind == []
    assert "resumed from" in finished.stderr
    audit = audit_run(run_dir)
    assert audit.holds, audit.problems
    assert (audit.issued, audit.trained, audit.dropped, audit.in_flight) == (80, 80, {}, ())
    steps = steps_of(run_dir)
    assert {row["step"] for row in steps} == set(range(1, 11))
    assert 1 <= max(row["rollout/staleness_max"] for row in steps) <= bound  # it did run ahead
    assert all(row["weights/probe_gap"] < 1e-4 for row in steps)
    # Fresh samples are the trainer's own policy; older ones are not, and the correction sees it.
    assert all(row["train_actor_training/engine_gap_max"] < 1e-4 for row in steps if not row["rollout/staleness_max"])
    assert all(row["train_actor_training/importance_weight"] > 0 for row in steps)


def test_what_is_left_out_is_in_the_ledger_with_its_reason(tiny: Tiny, tmp_path: Path) -> None:
    """What is kept has been scored by reference workers."""
    run_dir = tmp_path / "run"
    flags = tiny.rl_flags(
        run_dir, "--rollout.engine", "transformers", "--rollout.oversample", "1.5", "--rollout.drop_zero_spread",
        "true", "--steps", "3", "--evaluation.files", "[]", "--algorithm.kl_coef", "0.05", "--reference.placement",
        "workers", "--algorithm.minibatches", "1",
    )  # fmt: skip
    finished = run(flags, tmp_path / "log")
    assert finished.code == 0, finished.stderr
    assert finished.left_behind == []
    steps = steps_of(run_dir)
    assert [row["rollout/zero_spread_groups"] for row in steps] == [0, 0, 0]
    # The policy of the first step is the reference.
    divergence = [row["train_actor_training/approx_policy_kls"] for row in steps]
    assert 0 <= divergence[0] < 1e-9 < min(divergence[1:])
    assert all(row["ref_actor_performance/response_tokens_processed"] > 0 for row in steps)
    audit = audit_run(run_dir)
    assert audit.holds, audit.problems
    assert audit.trained == 3 * 8 and not audit.in_flight
    assert audit.dropped["oversampled"] >= 1 and audit.dropped["zero spread"] >= 1
    assert audit.issued == audit.trained + sum(audit.dropped.values())
