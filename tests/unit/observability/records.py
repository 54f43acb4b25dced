"""Metrics of a step that are easy to compute by hand."""

import re
from dataclasses import fields
from typing import Any

import torch

from slime_like.statistics import GRPOStats, ValueStats


def grpo_stats(**figures: float) -> GRPOStats:
    names = (
        "loss", "policy_loss", "kl_loss", "ratios", "clipfrac", "approx_policy_kls", "entropy", "old_gap_max",
        "engine_gap_mean", "engine_gap_max", "grad_norm", "learning_rate", "num_tokens",
    )  # fmt: skip
    values: dict[str, Any] = {name: torch.tensor(figures.get(name, 0.0), dtype=torch.float64) for name in names}
    return GRPOStats(**values)


def value_stats(**figures: float) -> ValueStats:
    return ValueStats(**{each.name: torch.tensor(figures.get(each.name, 0.0)) for each in fields(ValueStats)})


def phase_times() -> dict[str, float]:
    seconds = {"wait": 0.5, "generate": 4.0, "reward": 0.5, "score": 0.5, "critic": 0.0, "train": 2.0, "sync": 0.4}
    return seconds | {"orchestration": 0.1}


def rate(lengths: list[int]) -> float:
    """Count the TFLOPs of training Qwen2.5-0.5B on these lengths by hand.

    6 per token and element of a matrix, of which the embedding is the head; 6 per pair of tokens and element of queries
    and values, of 14 heads of 64. There are 24 layers.
    """
    pairs = sum(length * (length + 1) / 2 for length in lengths)
    layer = 2 * 896 * 896 + 2 * 896 * 128 + 3 * 896 * 4864
    return 6 * ((24 * layer + 151_936 * 896) * sum(lengths) + 24 * 14 * (64 + 64) * pairs) / 1e12


_RULES = """
    slow_phase idle_trainers idle_engines failed_samples engine_gap entropy_cliff length_cliff truncated no_gradient
    reward_flat repeated_text explained_variance disk
"""
HEALTH = {f"health/{rule}": 0.0 for rule in _RULES.split()}
_EXTREMES = ("ratios", "old_gap_max", "engine_gap_max", "learning_rate", "num_tokens")
_ZEROS = """
    policy_loss kl_loss clipfrac approx_policy_kls entropy grad_norm engine_gap_mean importance_weight
    importance_clipfrac bounded_fraction moe_aux_loss router_load_max distillation_kl
    routing_disagreement rejected_fraction engine_chi_square importance_ess perplexity engine_perplexity
"""
RL_METRICS = {
    **HEALTH,
    **{f"train_actor_training/{name}": 0.0 for name in _ZEROS.split()},
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
    # 200 tokens of eight rows, in 2 s of training on one rank; an H100's data sheet has 989 TFLOP/s
    "train_actor_performance/trained_tokens_per_second_per_rank": 100.0,
    "train_actor_performance/tflops_per_rank": rate([25, 25, 20, 20, 45, 17, 17, 31]) / 2,
    "train_actor_performance/mfu (%)": 100 * rate([25, 25, 20, 20, 45, 17, 17, 31]) / 2 / 989,
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
    "ref_actor_rewards/failed_fraction": 0.0,
    "ref_actor_rewards/rewards_func_math_verify_mean": 0.6,
    "ref_actor_rewards/successes_func_math_verify_mean": 0.6,
    "ref_actor_rewards/rewards_func_length_mean": 1.2,
    "ref_actor_rewards/successes_func_length_mean": 0.4,
    "queues/rollout_queue_size": 3.0,
    "rollout/staleness_mean": 0.6,
    "rollout/staleness_max": 2.0,
    "queues/train_replay_buffer_size": 64.0,
    **{f"phases/{name} (s)": seconds for name, seconds in phase_times().items()},
    "phases/orchestration (%)": 1.25,
    "rollout/tokens_per_second": 20.0,  # 80 tokens in the 4 s of generation
    "rollout/response_length_mean": 16.0,
    "rollout/response_length_max": 30.0,
    "rollout/truncated_fraction": 0.4,
    "rollout/aborted_fraction": 0.0,
    "rollout/repeated_fraction": 0.0,
    "rollout/zero_advantage_fraction": 0.0,
    "rollout/turns_mean": 1.8,
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
    "weights/sync (s)": 1.0,
    "weights/sync_bytes": 8.0,
    "weights/wire_bytes": 4.0,
    "weights/changed_fraction": 0.5,
    "weights/verification (s)": 0.1,
    "weights/verification (%)": 10.0,
}
SFT_METRICS = {
    **HEALTH,
    **{f"train_actor_training/{name}": 0.0 for name in _ZEROS.split()},
    "train_actor_training/loss": 2.0,
    **dict.fromkeys((f"train_actor_training/{name}" for name in _EXTREMES), 0.0),
    "train_actor_training/response_lengths": 4.0,
    **{
        name: RL_METRICS[name] for name in RL_METRICS if re.match("phases/|train.*(memory|step|sync|buffer|idle)", name)
    },
    "train_actor_performance/tokens_per_second": 1.0,
    "train_actor_performance/trained_tokens_per_second_per_rank": 19.0,
    "train_actor_performance/tflops_per_rank": rate([18, 20]) / 2,
    "train_actor_performance/mfu (%)": 100 * rate([18, 20]) / 2 / 989,
    "train_actor_performance/padded_tokens_percentage (%)": 5.0,
    "queues/train_replay_buffer_size": 0.0,
}
"""Of two responses with 8 tokens in all."""
