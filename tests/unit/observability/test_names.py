"""Names compared with a literal list, values with hand-computed ones."""

import dataclasses
import math
import re
from pathlib import Path

import pytest

from slime_like.observability.names import (
    IDLE_TIME,
    evaluation_metrics,
    source_kls,
    step_metrics,
    sync_metrics,
    update_metrics,
)
from slime_like.observability.records import EvaluationRecord, PhaseTimes, SyncRecord
from tests.unit.observability.records import mixed_record, phase_times, rl_record, sft_record, value_stats

ZEROS = """
    policy_loss kl_loss clipfrac approx_policy_kls entropy grad_norm engine_gap_mean importance_weight
    importance_clipfrac bounded_fraction moe_aux_loss router_load_max distillation_kl
    routing_disagreement rejected_fraction engine_chi_square importance_ess perplexity engine_perplexity
"""
RL_FIGURES = {
    **{f"train_actor_training/{name}": 0.0 for name in ZEROS.split()},
    # means over two optimizer steps, except old_gap_max (first), engine_gap_max (largest), learning_rate (last)
    "train_actor_training/loss": 2.0,
    "train_actor_training/ratios": 1.25,
    "train_actor_training/response_lengths": 16.0,
    "train_actor_training/learning_rate": 2e-3,
    "train_actor_training/old_gap_max": 1e-7,
    "train_actor_training/engine_gap_max": 0.5,
    "train_actor_training/num_tokens": 40.0,
    "train_actor_performance/total_step_time (s)": 8.0,
    "train_actor_performance/time_grpo_steps (s)": 2.0,
    "train_actor_performance/pct_time_grpo_steps (%)": 25.0,
    "train_actor_performance/tokens_per_second": 10.0,  # 80 response tokens in 8 s
    "train_actor_performance/time_weight_sync (s)": 0.4,
    "train_actor_performance/pct_time_weight_sync (%)": 5.0,
    "train_actor_performance/padded_tokens_percentage (%)": 25.0,
    "train_actor_performance/shared_tokens_percentage (%)": 25.0,
    "train_actor_performance/time_waiting_buffer (s)": 0.5,
    "train_actor_performance/pct_time_waiting_buffer (%)": 6.25,
    "train_actor_performance/time_idle (s)": 5.0,  # wait, generate and reward
    "train_actor_performance/pct_time_idle (%)": 62.5,
    "train_actor_performance/time_weight_gather (s)": 0.2,
    "train_actor_performance/pct_time_weight_gather (%)": 2.5,
    "train_actor_performance/memory/peak_rss (GiB)": 1.5,
    "train_actor_performance/memory/peak_gpu (GiB)": 3.5,
    "ref_actor_performance/time_total_ref_step (s)": 2.0,
    "ref_actor_performance/total_rollout_time (s)": 2.0,
    "ref_actor_performance/time_model_running (s)": 0.5,
    "ref_actor_performance/pct_time_model_running (%)": 25.0,
    "ref_actor_performance/time_waiting_buffer (s)": 1.5,
    "ref_actor_performance/pct_time_waiting_buffer (%)": 75.0,
    "ref_actor_performance/response_tokens_processed": 80.0,
    "ref_actor_performance/total_tokens_processed": 150.0,
    "ref_actor_performance/tokens_per_second": 160.0,  # over the time the model ran
    "ref_actor_rewards/rewards_mean": 0.9,  # 9 over 5 x 2 entries
    "ref_actor_rewards/successes_mean": 0.5,
    "ref_actor_rewards/total_reward_mean": 1.2,  # (1 + 0 + 1 + 1 + 3) / 5
    "ref_actor_rewards/scoring_failures": 0.0,
    **dict.fromkeys((f"ref_actor_rewards/failures_{outcome}" for outcome in ("masked", "resampled", "zeroed")), 0.0),
    "ref_actor_rewards/unscored_answers": 0.0,
    "ref_actor_rewards/rewards_func_math_verify_mean": 0.6,
    "ref_actor_rewards/successes_func_math_verify_mean": 0.6,
    "ref_actor_rewards/rewards_func_length_mean": 1.2,
    "ref_actor_rewards/successes_func_length_mean": 0.4,
    "queues/rollout_queue_size": 3.0,
    "rollout/staleness_mean": 0.75,
    "rollout/staleness_max": 2.0,
    "queues/train_replay_buffer_size": 64.0,
    **{f"phases/{name} (s)": seconds for name, seconds in phase_times().seconds.items()},
    "phases/orchestration (s)": 0.1,
    "phases/orchestration (%)": 1.25,
    "rollout/tokens_per_second": 20.0,  # 80 tokens in the 4 s of generation
    "rollout/response_length_mean": 16.0,
    "rollout/response_length_max": 30.0,
    "rollout/truncated_fraction": 0.4,
    "rollout/turns_mean": 1.6,
    "rollout/rows_mean": 1.6,
    "rollout/turn_limit_fraction": 0.0,
    "rollout/zero_spread_groups": 2.0,
    "rollout/groups": 3.0,
    "rollout/dropped_prompts": 2.0,
    "sources/sums/share": 0.4,
    "sources/sums/total_reward_mean": 0.5,
    "sources/sums/success": 0.5,
    "sources/sums/response_length_mean": 15.0,
    "sources/sums/truncated_fraction": 0.5,
    "sources/words/share": 0.6,
    "sources/words/total_reward_mean": 5 / 3,  # (1 + 1 + 3) / 3
    "sources/words/success": 2 / 3,
    "sources/words/response_length_mean": 50 / 3,
    "sources/words/truncated_fraction": 1 / 3,
    "weights/probe_gap": 1e-6,
}


def test_metrics_of_an_rl_step() -> None:
    metrics = step_metrics(mixed_record())
    assert set(metrics) == set(RL_FIGURES)
    assert metrics == pytest.approx(RL_FIGURES)
    assert all(type(value) is float for value in metrics.values())


def test_a_sources_kl_is_the_mean_of_the_updates_with_its_tokens() -> None:
    kls = [{"sums": 1.0, "words": 4.0}, {"sums": 2.0}]
    updates = [
        dataclasses.replace(update, source_kls=each) for update, each in zip(rl_record().updates, kls, strict=True)
    ]
    metrics = step_metrics(dataclasses.replace(rl_record(), updates=updates))
    assert {name: value for name, value in metrics.items() if name.startswith("sources/")} == {
        "sources/sums/distillation_kl": 1.5, "sources/words/distillation_kl": 4.0
    }  # fmt: skip


def test_metrics_of_a_supervised_step() -> None:
    metrics = step_metrics(dataclasses.replace(sft_record(), sources=["a", "b"]))
    assert metrics["train_actor_training/loss"] == 2.0
    absent = ("ref_actor", "rollout/", "weights/", "queues/rollout", "train_actor_performance/time_weight_gather")
    assert not [name for name in metrics if name.startswith(absent)]
    assert {name: value for name, value in metrics.items() if name.startswith("sources/")} == {
        "sources/a/share": 0.5, "sources/a/response_length_mean": 3.0,
        "sources/b/share": 0.5, "sources/b/response_length_mean": 5.0,
    }  # fmt: skip


def test_metrics_of_a_critics_steps() -> None:
    """Means over two optimizer steps, the first one's gap, the last one's rate, and all tokens."""
    steps = [value_stats(loss=1.0, old_gap_max=0.1, learning_rate=0.3, num_tokens=5.0, explained_variance=0.5),
             value_stats(loss=4.0, old_gap_max=0.7, learning_rate=0.2, num_tokens=6.0)]  # fmt: skip
    expected = {"loss": 2.5, "old_gap_max": 0.1, "learning_rate": 0.2, "num_tokens": 11.0, "explained_variance": 0.25}
    found = update_metrics(steps, "train_critic")
    assert {name: value for name, value in found.items() if value} == pytest.approx(
        {f"train_critic/{name}": value for name, value in expected.items()}
    )


def test_documentation_names_all_metrics() -> None:
    """``docs/metrics.md`` has a section per prefix. NAME and K are placeholders."""
    page = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text(encoding="utf-8")
    described = []
    for prefix, section in re.findall(r"^## `(\w+/)`\n(.*?)(?=^## )", page, re.DOTALL | re.MULTILINE):
        items = re.findall(r"^- (`.*?`): ", section, re.MULTILINE)
        names = [name for item in items for name in re.findall(r"`([^`]+)`", item)]
        described += [prefix + re.sub("NAME|K$", ".+", re.escape(name)) for name in names]
    means = {"accuracy": 0.5, "response_length_mean": 3.0, "truncated_fraction": 0.0}
    evaluation = EvaluationRecord(**means, num_responses=4, pass_at={2: 0.75})
    sync = SyncRecord(total_s=1.0, verification_s=0.1, nbytes=8, wire_nbytes=4, changed_fraction=0.5)
    penalties = {f"train_actor_training/{name}" for name in ("kl_reward", "kl_reward_coef", "distillation_kl")}
    penalties |= source_kls([{"sums": 1.0}]).keys()
    critic = update_metrics([value_stats()], "train_critic")
    logged = {*RL_FIGURES, *critic, *penalties, *evaluation_metrics(evaluation), *sync_metrics(sync)}
    assert sorted(name for name in logged if not any(re.fullmatch(each, name) for each in described)) == []
    assert sorted(each for each in described if not any(re.fullmatch(each, name) for name in logged)) == []


def test_a_step_of_zero_seconds() -> None:
    times = PhaseTimes(0.0, dict.fromkeys(phase_times().seconds, 0.0), 0.0)
    metrics = step_metrics(dataclasses.replace(rl_record(), times=times, packed_tokens=150))
    assert all(math.isfinite(value) for value in metrics.values())
    assert metrics["train_actor_performance/pct_time_grpo_steps (%)"] == 0.0
    assert metrics["rollout/response_length_mean"] == 16.0
    assert "rollout/tokens_per_second" not in metrics  # rollouts from disk have no speed


def test_idle_time_of_overlapping_phases() -> None:
    rollout = rl_record().rollout
    assert rollout is not None
    overlapping = dataclasses.replace(rollout, seconds=0.8)
    metrics = step_metrics(dataclasses.replace(rl_record(), trainers_busy_s=6.0, rollout=overlapping))
    assert metrics[IDLE_TIME] == pytest.approx(1.0)  # 5 s of waiting and 2 s of training, 6 s of work in them
    assert metrics["rollout/tokens_per_second"] == pytest.approx(100.0)


def test_evaluation_metrics() -> None:
    figures = {"accuracy": 0.75, "num_responses": 200.0, "response_length_mean": 6.5, "truncated_fraction": 0.01}
    figures["scoring_failures"] = 3.0
    record = EvaluationRecord(**figures, pass_at={2: 0.8})
    figures["pass@2"] = 0.8
    assert evaluation_metrics(record) == {f"evaluation/{name}": value for name, value in figures.items()}
    assert evaluation_metrics(record, "aime") == {f"evaluation/aime/{name}": v for name, v in figures.items()}
