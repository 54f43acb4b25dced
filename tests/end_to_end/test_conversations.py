"""A model learns to use a calculator in conversations that are sampled ahead of training."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from slime_like.data.dump import dump_path, load_trajectories
from slime_like.data.ledger import audit_run
from slime_like.examples.tiny_model import make_calculator_data, make_tiny_model
from tests.end_to_end.test_train import metrics_of, steps_of
from tests.support.interpreter import make_interpreter
from tests.support.processes import Command, succeed
from tests.support.shared_cluster import train_together

WARM_START_STEPS, BATCH = 160, 20
SAME = ("prompt_tokens", "response_tokens", "loss_mask", "rewards", "successes", "advantages")
SAME += ("support_ids", "support_sizes")


def demonstrations(path: Path, tokenizer: Any) -> list[tuple[list[int], list[int]]]:
    rows = []
    for row in map(json.loads, path.read_text().splitlines()):
        said = row["prompt"] if isinstance(row["prompt"], list) else [{"role": "user", "content": row["prompt"]}]
        text = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
        response = [*tokenizer.encode(row["response"], add_special_tokens=False), tokenizer.eos_token_id]
        rows.append((tokenizer.encode(text, add_special_tokens=False), response))
    return rows


def batches(rows: list[tuple[list[int], list[int]]]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for start in range(0, WARM_START_STEPS * BATCH, BATCH):
        chosen = rows[start : start + BATCH]
        length = max(len(prompt) + len(response) for prompt, response in chosen)
        ids, labels = torch.zeros(BATCH, length, dtype=torch.int64), torch.full((BATCH, length), -100)
        for row, (prompt, response) in enumerate(chosen):
            ids[row, : len(prompt) + len(response)] = torch.tensor([*prompt, *response])
            labels[row, len(prompt) : len(prompt) + len(response)] = torch.tensor(response)
        yield ids, labels


@pytest.fixture(scope="module")
def imitator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model that can ask the calculator but mostly guesses, after some seconds of supervised training."""
    root = tmp_path_factory.mktemp("imitator")
    make_tiny_model(root)
    make_calculator_data(root / "data", guesses=0.6)
    model = AutoModelForCausalLM.from_pretrained(root, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=WARM_START_STEPS, pct_start=0.1)
    for ids, labels in batches(demonstrations(root / "data" / "sft.jsonl", AutoTokenizer.from_pretrained(root))):
        optimizer.zero_grad()
        model(input_ids=ids, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.save_pretrained(root)
    return root


@pytest.mark.acceptance
def test_the_reward_of_conversations_rises(imitator: Path, tmp_path: Path) -> None:
    """The engine is in another interpreter and dies. Its groups start again, and none is lost."""
    run_dir = tmp_path / "run"
    flags = [
        "train", "configs/calculator.yaml", "--run_dir", str(run_dir), "--model.path", str(imitator),
        "--data.train", str(imitator / "data" / "train.jsonl"), "--steps", "9",
        "--evaluation.files", str(imitator / "data" / "eval.jsonl"), "--evaluation.max_prompts", "48",
        "--evaluation.temperature", "1",
        "--rollout.python", str(make_interpreter(tmp_path / "other")),
        "--rollout.prompts_per_step", "16", "--rollout.max_staleness", "1",
        "--algorithm.importance.correction", "truncate", "--trainer.optimizer.lr", "4e-4",
        "--trainer.optimizer.decay", "constant", "--debug.samples_per_step", "16",
        "--trainer.cpu_threads", "1", "--logging.progress", "plain",
    ]  # fmt: skip
    with Command(flags, tmp_path / "log") as command:
        command.wait_for_rows(run_dir, 4)
        command.named("ray::EngineActor").kill()
        finished = command.succeed(timeout_s=200)
    assert "engine 0 (transformers) was restarted" in finished.stderr
    started = (tmp_path / "other" / "started").read_text().splitlines()
    assert len({line for line in started if "default_worker.py" in line}) == 2
    assert {path.name for path in (run_dir / "worker_logs").glob("engine-*")} == {"engine-0.log", "engine-0.2.log"}
    audit = audit_run(run_dir)
    assert not audit.problems
    assert (audit.issued, audit.trained, audit.in_flight) == (9 * 16, 9 * 16, ())
    steps = steps_of(run_dir)
    assert all(row["weights/probe_gap"] < 1e-4 and row["rollout/staleness_max"] <= 1 for row in steps)
    rewards = [row["ref_actor_rewards/rewards_func_math_verify_mean"] for row in steps]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.15, rewards
    # The calculator judges nearly like math-verify, which accepts more answers, such as "1776]".
    means = [row["ref_actor_rewards/rewards_func_environment_mean"] for row in steps]
    assert rewards == pytest.approx(means, abs=0.05)
    accuracies = [row["evaluation/accuracy"] for row in metrics_of(run_dir) if "evaluation/accuracy" in row]
    assert accuracies[-1] > accuracies[0]
    # Metrics exclude observations: their logprob of 0 would be a gap of several nats.
    assert all(row["train_actor_training/engine_gap_max"] < 1e-4 for row in steps if not row["rollout/staleness_max"])
    assert max(row["rollout/response_length_max"] for row in steps) <= 3 * 10  # max_turns times max_turn_tokens
    table = map(json.loads, (run_dir / "tables" / "per_sample_debug_table.jsonl").read_text().splitlines())
    conversations = [row["Conversation"] for row in table if row["Turns"] == 2]
    assert any("\n1 environment: <tool>" in text and "\n2 model: " in text for text in conversations)


def test_an_agent_trains_like_the_environment_that_it_imitates(imitator: Path, tmp_path: Path) -> None:
    """Rows, masks, supports, rewards, advantages and gradients are the same."""
    recipes = {"calculator": ["--rollout.max_new_tokens", "64"], "calculator_agent": []}
    runs = [
        [
            "train", f"configs/{recipe}.yaml", "--run_dir", str(tmp_path / recipe), "--model.path", str(imitator),
            "--data.train", str(imitator / "data" / "train.jsonl"), "--steps", "2", "--evaluation.files", "[]",
            "--rollout.prompts_per_step", "4", "--debug.save_rollouts", f"{tmp_path}/{recipe}-rollouts",
            "--trainer.cpu_threads", "1", "--trainer.optimizer.warmup_steps", "0", "--logging.progress", "plain",
            "--logging.tensorboard", "false", "--rollout.top_p", "0.9", "--rollout.top_k", "40", *more,
        ]
        for recipe, more in recipes.items()
    ]  # fmt: skip
    train_together(runs, tmp_path)
    dumps = {recipe: [dump_path(tmp_path / f"{recipe}-rollouts", step) for step in (1, 2)] for recipe in recipes}
    kept = {recipe: [row for dump in dumps[recipe] for row in load_trajectories(dump)] for recipe in recipes}
    metrics = {recipe: steps_of(tmp_path / recipe) for recipe in recipes}
    assert len(kept["calculator"]) == 2 * 4 * 8
    for one, other in zip(kept["calculator"], kept["calculator_agent"], strict=True):
        assert (one.sequence_id, one.rollout_id) == (other.sequence_id, other.rollout_id)
        for name in SAME:
            assert torch.equal(getattr(one, name), getattr(other, name)), (one.sequence_id, name)
        assert one.reward_metadata["conversation"]["turns"] == other.reward_metadata["conversation"]["turns"]
    assert all(row["train_actor_training/engine_gap_max"] < 1e-4 for row in metrics["calculator_agent"])
    for name in ("train_actor_training/loss", "train_actor_training/grad_norm"):
        assert [row[name] for row in metrics["calculator"]] == pytest.approx(
            [row[name] for row in metrics["calculator_agent"]], rel=1e-6
        )


_ENGINES = ["transformers", *(pytest.param(name, marks=pytest.mark.acceptance) for name in ("vllm", "sglang"))]


@pytest.mark.parametrize("engine", _ENGINES)
def test_an_unmodified_harness_trains(imitator: Path, tmp_path: Path, engine: str) -> None:
    """It edits its history, so each rollout has two rows. Their tokens were sampled, and the trainer's logprobs agree
    with the engine's."""
    pytest.importorskip("smolagents", reason="the extra agents is not installed")
    run_dir, dump = tmp_path / "run", tmp_path / "rollouts"
    flags = [
        "train", "configs/smolagents_agent.yaml", "--run_dir", str(run_dir), "--model.path", str(imitator),
        "--model.dtype", "float32", "--data.train", str(imitator / "data" / "train.jsonl"), "--data.max_prompt_tokens",
        "48", "--steps", "2", "--rollout.engine", engine, "--rollout.engine_args", "{}", "--rollout.max_new_tokens",
        "16", "--rollout.max_model_len", "1024", "--rollout.prompts_per_step", "2", "--rollout.samples_per_prompt", "4",
        "--rollout.agent.workers", "2", "--rollout.agent.options", "{max_steps: 1, system_prompt: 'Write <code>.'}",
        "--reward.functions", "[{name: agent}, {name: format, options: {pattern: '.*[0-4].?'}}]",
        "--reward.workers", "1", "--cluster.placement", "separate", "--trainer.target_tokens_per_batch", "4096",
        "--trainer.parallel.data", "1", "--rollout.num_engines", "1",
        "--trainer.recompute", "none", "--trainer.optimizer.warmup_steps", "0", "--trainer.cpu_threads", "1",
        "--checkpoint.every", "0", "--debug.save_rollouts", str(dump), "--logging.progress", "plain",
        "--logging.tensorboard", "false",
    ]  # fmt: skip
    succeed(flags, tmp_path / "log")
    steps = steps_of(run_dir)
    assert [row["rollout/rows_mean"] for row in steps] == [2.0, 2.0]
    assert all(row["train_actor_training/engine_gap_max"] < 1e-4 for row in steps)
    assert any(row["train_actor_training/grad_norm"] > 0 for row in steps)
    kept = [row for step in (1, 2) for row in load_trajectories(dump_path(dump, step))]
    assert len(kept) == 2 * 2 * 4 * 2 and all(row.loss_mask.all() for row in kept)
