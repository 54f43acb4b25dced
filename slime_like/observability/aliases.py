"""A second, plain name of every metric whose written name has units in parentheses or a section that misleads."""

import re
from collections.abc import Mapping

_PERFORMANCE, _REFERENCE = "train_actor_performance/", "ref_actor_performance/"
_REWARDS = "ref_actor_rewards/"

_ALIASES = {
    "train_actor_training/ratios": "train/ratio",
    "train_actor_training/clipfrac": "train/clip_fraction",
    "train_actor_training/approx_policy_kls": "train/reference_kl",
    "train_actor_training/response_lengths": "train/response_length_mean",
    "train_actor_training/importance_clipfrac": "train/importance_clip_fraction",
    f"{_PERFORMANCE}total_step_time (s)": "time/step_s",
    f"{_PERFORMANCE}tokens_per_second": "train/tokens_per_second",
    f"{_PERFORMANCE}time_grpo_steps (s)": "time/train_s",
    f"{_PERFORMANCE}pct_time_grpo_steps (%)": "time/train_pct",
    f"{_PERFORMANCE}time_weight_sync (s)": "time/sync_s",
    f"{_PERFORMANCE}pct_time_weight_sync (%)": "time/sync_pct",
    f"{_PERFORMANCE}time_weight_gather (s)": "time/weight_gather_s",
    f"{_PERFORMANCE}pct_time_weight_gather (%)": "time/weight_gather_pct",
    f"{_PERFORMANCE}time_waiting_buffer (s)": "time/wait_s",
    f"{_PERFORMANCE}pct_time_waiting_buffer (%)": "time/wait_pct",
    f"{_PERFORMANCE}time_idle (s)": "time/idle_s",
    f"{_PERFORMANCE}pct_time_idle (%)": "time/idle_pct",
    f"{_PERFORMANCE}padded_tokens_percentage (%)": "train/padding_pct",
    f"{_PERFORMANCE}shared_tokens_percentage (%)": "train/shared_pct",
    f"{_PERFORMANCE}memory/peak_rss (GiB)": "memory/peak_rss_gib",
    f"{_PERFORMANCE}memory/peak_gpu (GiB)": "memory/peak_gpu_gib",
    f"{_REFERENCE}time_total_ref_step (s)": "reference/step_s",
    f"{_REFERENCE}total_rollout_time (s)": "reference/step_s",
    f"{_REFERENCE}time_model_running (s)": "reference/scoring_s",
    f"{_REFERENCE}pct_time_model_running (%)": "reference/scoring_pct",
    f"{_REFERENCE}time_waiting_buffer (s)": "reference/wait_s",
    f"{_REFERENCE}pct_time_waiting_buffer (%)": "reference/wait_pct",
    f"{_REFERENCE}response_tokens_processed": "reference/response_tokens",
    f"{_REFERENCE}total_tokens_processed": "reference/total_tokens",
    f"{_REFERENCE}tokens_per_second": "reference/tokens_per_second",
    f"{_REWARDS}rewards_mean": "reward/unweighted_mean",
    f"{_REWARDS}successes_mean": "reward/success_fraction",
    f"{_REWARDS}total_reward_mean": "reward/mean",
    f"{_REWARDS}scoring_failures": "reward/scoring_failures",
    "queues/rollout_queue_size": "queues/sampling_groups",
    "queues/train_replay_buffer_size": "queues/ready_groups",
    "weights/sync (s)": "weights/sync_s",
    "weights/verification (s)": "weights/verification_s",
    "weights/verification (%)": "weights/verification_pct",
    "phases/orchestration (%)": "time/orchestration_pct",
}
"""Two written names of one quantity have one alias: both have the same value."""

_PATTERNS = (
    (re.compile(r"train_actor_training/(.+)"), r"train/\1"),
    (re.compile(r"ref_actor_rewards/rewards_func_(.+)_mean"), r"reward/\1/mean"),
    (re.compile(r"ref_actor_rewards/successes_func_(.+)_mean"), r"reward/\1/success_fraction"),
    (re.compile(r"phases/(.+) \(s\)"), r"time/\1_s"),
)


def alias_of(name: str) -> str | None:
    """The plain name of a metric; none where the written name is plain."""
    if name in _ALIASES:
        return _ALIASES[name]
    matches = ((pattern.fullmatch(name), plain) for pattern, plain in _PATTERNS)
    return next((found.expand(plain) for found, plain in matches if found), None)


def with_aliases(values: Mapping[str, float]) -> dict[str, float]:
    """``values``, and behind them each value that has an alias under that."""
    aliases = ((alias_of(name), value) for name, value in values.items())
    return {**values, **{alias: value for alias, value in aliases if alias is not None}}
