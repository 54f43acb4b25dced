"""Sampling during training: staleness is bounded, and the ledger accounts for every group."""

import shutil
import time
from pathlib import Path

import pytest
import torch
from transformers import GraniteConfig, GraniteForCausalLM

from slime_like.data.ledger import audit_run
from slime_like.examples.tiny_model import VOCAB_SIZE
from tests.conftest import Tiny
from tests.end_to_end.test_train import steps_of
from tests.support.processes import Command, succeed
from tests.support.shared_cluster import train_together


def test_sampling_runs_ahead_within_its_bound_and_survives_a_kill(tiny: Tiny, tmp_path: Path) -> None:
    """The engine gets new weights during responses, and two trainer ranks get samples as they arrive. After a kill,
    groups in flight are issued again."""
    run_dir, bound = tmp_path / "run", 2
    flags = tiny.rl_flags(
        run_dir, "--steps", "8", "--rollout.max_staleness", str(bound), "--checkpoint.every", "2",
        "--rollout.engine", "transformers",
        "--algorithm.importance.correction", "truncate", "--algorithm.minibatches", "1", "--evaluation.files", "[]",
        "--rollout.stream", "true", "--trainer.target_tokens_per_batch", "64", "--trainer.parallel.data", "2",
    )  # fmt: skip
    with Command(flags, tmp_path / "log-0") as command:
        command.wait_for("checkpoint of step 4", timeout_s=200)
        time.sleep(0.3)  # into later steps
        command.kill()
        killed = command.finish(timeout_s=60)
    assert killed.code != 0 and killed.left_behind == []
    finished = succeed(flags, tmp_path / "log-1")
    assert "resumed from" in finished.stderr
    audit = audit_run(run_dir)
    assert not audit.problems
    assert (audit.issued, audit.trained, audit.dropped, audit.in_flight) == (64, 64, {}, ())
    steps = steps_of(run_dir)
    assert {row["step"] for row in steps} == set(range(1, 9))
    assert 1 <= max(row["rollout/staleness_max"] for row in steps) <= bound  # it did run ahead
    assert all(row["weights/probe_gap"] < 1e-4 for row in steps)
    # Fresh samples are from the trainer's policy. Older ones are not, and the correction sees it.
    assert all(row["train_actor_training/engine_gap_max"] < 1e-4 for row in steps if not row["rollout/staleness_max"])
    assert all(row["train_actor_training/importance_weight"] > 0 for row in steps)


@pytest.fixture(scope="module")
def runs(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of two runs: one that drops groups, and the asynchronous FSDP recipe."""
    root = tmp_path_factory.mktemp("runs")
    dropping = tiny.rl_flags(
        root / "dropping", "--rollout.engine", "transformers", "--rollout.oversample", "1.5",
        "--rollout.drop_zero_spread", "true", "--steps", "3", "--evaluation.files", "[]", "--algorithm.kl.coef", "0.05",
        "--reference.placement", "workers", "--algorithm.minibatches", "1",
    )  # fmt: skip
    train_together([dropping, asynchronous(tiny, root)], root)
    return root


def test_dropped_groups_are_in_the_ledger_with_a_reason(runs: Path) -> None:
    """Reference workers score the kept groups."""
    run_dir = runs / "dropping"
    steps = steps_of(run_dir)
    assert [row["rollout/zero_spread_groups"] for row in steps] == [0, 0, 0]
    # The first step's policy is the reference.
    divergence = [row["train_actor_training/approx_policy_kls"] for row in steps]
    assert 0 <= divergence[0] < 1e-9 < min(divergence[1:])
    assert all(row["ref_actor_performance/response_tokens_processed"] > 0 for row in steps)
    audit = audit_run(run_dir)
    assert not audit.problems
    assert audit.trained == 3 * 8 and not audit.in_flight
    assert audit.dropped["oversampled"] >= 1 and audit.dropped["zero spread"] >= 1
    assert audit.issued == audit.trained + sum(audit.dropped.values())


def asynchronous(tiny: Tiny, root: Path) -> list[str]:
    """Make a model of a family without conversion, and return the flags of its run."""
    model = root / "model"
    shutil.copytree(tiny.model, model)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    factors = {"logits_scaling": 0.5, "embedding_multiplier": 3.0, "residual_multiplier": 0.7}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    torch.manual_seed(0)
    GraniteForCausalLM(GraniteConfig(vocab_size=VOCAB_SIZE, **sizes, **factors, **ids)).save_pretrained(model)
    return [
        "train", "configs/async_grpo_fsdp.yaml", "--run_dir", str(root / "asynchronous"), "--model.path", str(model),
        "--model.dtype", "float32", "--data.train", str(tiny.data / "train.jsonl"), "--data.max_prompt_tokens", "32",
        "--rollout.engine", "transformers", "--rollout.num_engines", "1", "--rollout.max_new_tokens", "8",
        "--rollout.prompts_per_step", "8", "--rollout.samples_per_prompt", "4", "--steps", "3",
        "--reward.functions", "[{name: format, options: {pattern: '.*[a-m].*'}}]", "--reward.workers", "1",
        "--trainer.parallel.data", "1", "--trainer.target_tokens_per_batch", "128",
        "--cluster.allow_idle_gpus", "true", "--trainer.optimizer.lr", "1e-3", "--trainer.optimizer.warmup_steps", "0",
        "--checkpoint.every", "3", "--trainer.cpu_threads", "1", "--logging.progress", "plain",
    ]  # fmt: skip


def test_the_asynchronous_fsdp_recipe_trains_a_family_without_conversion(runs: Path) -> None:
    """An engine, a reference worker and a streaming trainer work concurrently. All three must apply the model's
    multipliers, since their logprobs are compared."""
    run_dir = runs / "asynchronous"
    steps = steps_of(run_dir)
    assert len(steps) == 3
    assert all(row["weights/probe_gap"] < 1e-4 for row in steps)
    assert all(row["train_actor_training/engine_gap_max"] < 1e-4 for row in steps if not row["rollout/staleness_max"])
    divergence = [row["train_actor_training/approx_policy_kls"] for row in steps]
    assert 0 <= divergence[0] < 1e-9 < divergence[2]
    # Groups of a later step may have been scored during an earlier one.
    scored = sum(row["ref_actor_performance/response_tokens_processed"] for row in steps)
    assert scored >= sum(row["train_actor_training/num_tokens"] for row in steps)
    assert not audit_run(run_dir).problems
    exported = GraniteForCausalLM.from_pretrained(run_dir / "hf")
    assert exported.config.logits_scaling == 0.5
