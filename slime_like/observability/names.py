"""Names of all metrics, and their computation from a step's records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from slime_like.observability.records import (
    PHASES,
    EvaluationRecord,
    RewardRecord,
    RolloutRecord,
    ScoringRecord,
    StepRecord,
    SyncRecord,
)

if TYPE_CHECKING:
    from slime_like.statistics import StepStats

STEP_TIME = "train_actor_performance/total_step_time (s)"
REWARD = "ref_actor_rewards/total_reward_mean"
LOSS = "train_actor_training/loss"
KL = "train_actor_training/kl_loss"
ACCURACY = "evaluation/accuracy"
FAILURES = "ref_actor_rewards/scoring_failures"
HELD_OUT_FAILURES = "evaluation/scoring_failures"
IDLE_TIME = "train_actor_performance/time_idle (s)"
ROLLOUT_SPEED = "rollout/tokens_per_second"
SCORING_SPEED = "score/tokens_per_second"
CONVERSION_SPEED = "convert/gigabytes_per_second"

_FLAT_GROUPS = "rollout/zero_spread_groups"
_GROUPS = "rollout/groups"
_TURN_LIMIT = "rollout/turn_limit_fraction"
_REWARD_OF = "ref_actor_rewards/rewards_func_"
_SOURCES, _SOURCE_REWARD = "sources/", "/total_reward_mean"

# Groups whose rewards differ by less than this, by rounding only, have no gradient.
ZERO_SPREAD = 1e-6

_SHOWN_SHARE = 10.0

_NOT_MEANS = {"old_gap_max", "engine_gap_max", "learning_rate", "num_tokens", "metadata", "source_kls"}


def phase_seconds(phase: str) -> str:
    """Return the name of the seconds spent in ``phase``, one of ``PHASES`` or "orchestration"."""
    return f"phases/{phase} (s)"


def step_metrics(record: StepRecord) -> dict[str, float]:
    """Return the metrics of one training step by name. Seconds are wall time, shares are percent."""
    metrics = {**update_metrics(record.updates), **update_metrics(record.critic, "train_critic"), **record.penalties}
    metrics["train_actor_training/response_lengths"] = float(np.mean(record.response_lengths))
    metrics |= _performance(record)
    metrics |= {phase_seconds(phase): value for phase, value in record.times.seconds.items()}
    metrics[phase_seconds("orchestration")] = record.times.orchestration_s
    metrics["phases/orchestration (%)"] = 100 * _ratio(record.times.orchestration_s, record.times.step_s)
    metrics["queues/train_replay_buffer_size"] = float(record.replay_buffer_size)
    if record.rewards is not None:
        metrics |= reward_metrics(record.rewards)
        totals, group_ids = _totals(record.rewards), np.asarray(record.rewards.group_ids)
        flat = [bool(np.ptp(totals[group_ids == group]) < ZERO_SPREAD) for group in np.unique(group_ids)]
        metrics |= {_FLAT_GROUPS: float(sum(flat)), _GROUPS: float(len(flat))}
    if record.rollout is not None:
        metrics |= _rollout(record.rollout, record.response_lengths, record.times.seconds["generate"])
    metrics |= source_metrics(record) | source_kls([getattr(update, "source_kls", {}) for update in record.updates])
    for role, work in record.scoring.items():
        metrics |= {**scoring_metrics(role, work), **work.metrics}
    if record.sync is not None:
        metrics |= sync_metrics(record.sync)
    if record.probe_gap is not None:
        metrics["weights/probe_gap"] = record.probe_gap
    return metrics


def update_metrics(updates: Sequence[StepStats], section: str = "train_actor_training") -> dict[str, float]:
    """Return means over a training step's optimizer steps, of the policy or the critic, with four exceptions;
    nothing if there were none.

    ``old_gap_max`` is from the first optimizer step, because later ones differ from the old policy by design.
    ``engine_gap_max`` is the largest, ``learning_rate`` the last, and ``num_tokens`` the sum.
    """
    if not updates:
        return {}
    means = [each.name for each in fields(updates[0]) if each.name not in _NOT_MEANS]
    figures = {name: float(np.mean([float(getattr(update, name)) for update in updates])) for name in means}
    figures["old_gap_max"] = float(updates[0].old_gap_max)
    for name in {"engine_gap_max"} & {each.name for each in fields(updates[0])}:
        figures[name] = float(np.max([float(getattr(update, name)) for update in updates]))
    figures["learning_rate"] = float(updates[-1].learning_rate)
    figures["num_tokens"] = sum(float(update.num_tokens) for update in updates)
    return {f"{section}/{name}": value for name, value in figures.items()}


def reward_metrics(record: RewardRecord) -> dict[str, float]:
    """Return mean reward and success over all responses, for all functions together and for each one.

    ``rewards_mean`` weighs all functions equally. ``total_reward_mean`` is the weighted sum, as in advantages.
    """
    rewards, successes = np.asarray(record.rewards, np.float64), np.asarray(record.successes, np.float64)
    metrics = {
        "ref_actor_rewards/rewards_mean": float(rewards.mean()),
        "ref_actor_rewards/successes_mean": float(successes.mean()),
        REWARD: float(_totals(record).mean()),
        FAILURES: float(len(record.failures)),
        "ref_actor_rewards/unscored_answers": float(record.unscored_answers),
    }
    counts = {name: float(record.failures.count(name)) for name in ("masked", "resampled", "zeroed")}
    metrics |= {f"ref_actor_rewards/failures_{name}": count for name, count in counts.items()}
    for name, reward, success in zip(record.func_names, rewards.mean(axis=0), successes.mean(axis=0), strict=True):
        metrics[f"{_REWARD_OF}{name}_mean"] = float(reward)
        metrics[f"ref_actor_rewards/successes_func_{name}_mean"] = float(success)
    return metrics


def source_metrics(record: StepRecord) -> dict[str, float]:
    """Return the metrics of each source in a mixture. Success is the first reward function's."""
    columns = {"/response_length_mean": np.asarray(record.response_lengths, np.float64)}
    if record.rewards is not None and record.rollout is not None:
        columns[_SOURCE_REWARD] = _totals(record.rewards)
        columns["/success"] = np.asarray(record.rewards.successes, np.float64)[:, 0]
        columns["/truncated_fraction"] = np.asarray([reason == "length" for reason in record.rollout.finish_reasons])
    sources, metrics = np.asarray(record.sources), dict[str, float]()
    for name in sorted(set(record.sources) - {""}):
        own = sources == name
        metrics[f"{_SOURCES}{name}/share"] = float(own.mean())
        metrics |= {f"{_SOURCES}{name}{what}": float(values[own].mean()) for what, values in columns.items()}
    return metrics


def source_kls(updates: Sequence[Mapping[Any, float]]) -> dict[str, float]:
    """Return the mean KL to each source's teacher over the optimizer steps with tokens of it."""
    each = {name: [kls[name] for kls in updates if name in kls] for kls in updates for name in kls}
    return {f"{_SOURCES}{name}/distillation_kl": float(np.mean(found)) for name, found in each.items()}


def scoring_metrics(role: str, record: ScoringRecord) -> dict[str, float]:
    """Return the performance of a frozen role. Two names are in use for its step time."""
    prefix = f"{'ref_actor' if role == 'reference' else role}_performance"
    return {
        f"{prefix}/time_total_ref_step (s)": record.total_s,
        f"{prefix}/total_rollout_time (s)": record.total_s,
        **_timed(prefix, "model_running", record.model_running_s, record.total_s),
        **_timed(prefix, "waiting_buffer", max(0.0, record.total_s - record.model_running_s), record.total_s),
        f"{prefix}/response_tokens_processed": float(record.response_tokens),
        f"{prefix}/total_tokens_processed": float(record.total_tokens),
        f"{prefix}/tokens_per_second": _ratio(record.response_tokens, record.model_running_s),
    }


def sync_metrics(record: SyncRecord) -> dict[str, float]:
    metrics = {
        "weights/sync (s)": record.total_s,
        "weights/sync_bytes": float(record.nbytes),
        "weights/wire_bytes": float(record.wire_nbytes),
        "weights/verification (s)": record.verification_s,
        "weights/verification (%)": 100 * _ratio(record.verification_s, record.total_s),
    }
    if record.changed_fraction is not None:
        metrics["weights/changed_fraction"] = record.changed_fraction
    return metrics


def evaluation_metrics(record: EvaluationRecord, dataset: str | None = None) -> dict[str, float]:
    """Return the metrics of one held-out evaluation, of one file or of all files together."""
    prefix = "evaluation" if dataset is None else f"evaluation/{dataset}"
    names = ("accuracy", "num_responses", "response_length_mean", "truncated_fraction", "scoring_failures")
    passes = {f"{prefix}/pass@{k}": value for k, value in record.pass_at.items()}
    return passes | {f"{prefix}/{name}": float(getattr(record, name)) for name in names}


def _performance(record: StepRecord) -> dict[str, float]:
    prefix, times = "train_actor_performance", record.times
    padded = record.packed_tokens - record.actual_tokens
    idle = times.seconds["wait"] + times.seconds["generate"] + times.seconds["reward"]
    if record.trainers_busy_s is not None:  # from a sync's end to the update's end, minus the ranks' work
        idle = max(0.0, idle + times.seconds["train"] - record.trainers_busy_s)
    metrics = {
        **{f"{prefix}/memory/{name}": float(value) for name, value in record.memory.items()},
        STEP_TIME: times.step_s,
        **_timed(prefix, "grpo_steps", times.seconds["train"], times.step_s),
        **_timed(prefix, "weight_sync", times.seconds["sync"], times.step_s),
        **_timed(prefix, "waiting_buffer", times.seconds["wait"], times.step_s),
        **_timed(prefix, "idle", idle, times.step_s),
        f"{prefix}/tokens_per_second": _ratio(sum(record.response_lengths), times.step_s),
        f"{prefix}/padded_tokens_percentage (%)": 100 * _ratio(padded, record.packed_tokens),
    }
    if record.shared_tokens:
        whole = record.actual_tokens + record.shared_tokens
        metrics[f"{prefix}/shared_tokens_percentage (%)"] = 100 * _ratio(record.shared_tokens, whole)
    if record.weight_gather_s is not None:
        metrics |= _timed(prefix, "weight_gather", record.weight_gather_s, times.step_s)
    return metrics


def _rollout(record: RolloutRecord, lengths: Sequence[int], generate_s: float) -> dict[str, float]:
    seconds = generate_s if record.seconds is None else record.seconds
    truncated = sum(reason == "length" for reason in record.finish_reasons)
    # Rollouts from disk took no time, so they have no speed (rather than a speed of 0).
    optional = {ROLLOUT_SPEED: sum(lengths) / seconds} if seconds > 0 else {}
    if record.turns:
        optional["rollout/turns_mean"] = float(np.mean(record.turns))
        out_of_turns = sum(reason == "turns" for reason in record.finish_reasons)
        optional[_TURN_LIMIT] = _ratio(out_of_turns, len(record.finish_reasons))
    if max(record.rows, default=1) > 1:
        optional["rollout/rows_mean"] = float(np.mean(record.rows))
    return optional | {
        "rollout/response_length_mean": float(np.mean(lengths)),
        "rollout/response_length_max": float(max(lengths)),
        "rollout/truncated_fraction": _ratio(truncated, len(record.finish_reasons)),
        "rollout/dropped_prompts": float(record.dropped_prompts),
        "queues/rollout_queue_size": float(record.queue_size),
        "rollout/staleness_mean": float(np.mean(record.staleness)) if record.staleness else 0.0,
        "rollout/staleness_max": float(max(record.staleness, default=0)),
    }


def _totals(record: RewardRecord) -> np.ndarray:
    return np.asarray(record.rewards, np.float64) @ np.asarray(record.weights, np.float64)


def _timed(prefix: str, name: str, seconds: float, total_s: float) -> dict[str, float]:
    return {f"{prefix}/time_{name} (s)": seconds, f"{prefix}/pct_time_{name} (%)": 100 * _ratio(seconds, total_s)}


def _ratio(numerator: float, denominator: float) -> float:
    return numerator / denominator if denominator > 0 else 0.0


# Metric, label, format. Metrics that a run does not have are not shown.
FIGURES = (
    (STEP_TIME, "step time", "{:.2f} s"),
    (LOSS, "loss", "{:.4g}"),
    (REWARD, "reward", "{:.3f}"),
    (ACCURACY, "accuracy", "{:.3f}"),
    ("rollout/response_length_mean", "response tokens", "{:.0f}"),
    ("rollout/truncated_fraction", "cut off", "{:.0%}"),
    (_TURN_LIMIT, "out of turns", "{:.0%}"),
    (_FLAT_GROUPS, "flat groups", "{:.0f}"),
    (KL, "KL", "{:.3g}"),
    ("train_actor_training/entropy", "entropy", "{:.2f}"),
    ("train_actor_training/grad_norm", "grad norm", "{:.3g}"),
    (ROLLOUT_SPEED, "rollout tokens/s", "{:,.0f}"),
    (SCORING_SPEED, "tokens/s", "{:,.0f}"),
    (CONVERSION_SPEED, "GB/s", "{:.2f}"),
)


def shown_figures(values: Mapping[str, float], evaluated: str = "") -> list[tuple[str, str]]:
    """Return (label, formatted value) of the metrics in ``values``, in the order of ``FIGURES``.

    If there are several reward functions, their means follow the weighted sum. With a reward, the loss is left out,
    because it is almost 0 on-policy. A KL of 0 (no reference) and a turn limit that was never reached are left out too.

    Args:
        evaluated: text after the accuracy, e.g. its step.
    """
    shown = []
    for name, label, form in FIGURES:
        hidden = (name == LOSS and REWARD in values) or (name in (KL, _TURN_LIMIT) and not values.get(name))
        if name in values and not hidden:
            after = {ACCURACY: evaluated, _FLAT_GROUPS: f"/{values[_GROUPS]:.0f}" if _GROUPS in values else ""}
            shown.append((label, form.format(values[name]) + after.get(name, "")))
        if name == REWARD:
            shown += [(function, form.format(values[mean])) for mean, function in function_means(values)]
    return shown


def function_means(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return (metric, reward function) for each function's mean reward in ``names``; empty if there is only one."""
    found = _between(_REWARD_OF, names, "_mean")
    return found if len(found) > 1 else []


def source_means(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return (metric, source) for the mean reward of each source in ``names``."""
    return _between(_SOURCES, names, _SOURCE_REWARD)


def _between(prefix: str, names: Iterable[str], suffix: str) -> list[tuple[str, str]]:
    found = [name for name in names if name.startswith(prefix) and name.endswith(suffix)]
    return [(name, name.removeprefix(prefix).removesuffix(suffix)) for name in found]


def phase_shares(values: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return (phase, percent of all phases' time) for every phase that took any time, orchestration last."""
    seconds = {phase: values.get(phase_seconds(phase), 0.0) for phase in (*PHASES, "orchestration")}
    total = sum(seconds.values())
    return [(phase, 100 * value / total) for phase, value in seconds.items() if value > 0]


def phases_text(shares: Sequence[tuple[str, float]]) -> str:
    """Format the ``phase_shares`` of a tenth or more, and the sum of all others as "other"."""
    long = [(phase, share) for phase, share in shares if share >= _SHOWN_SHARE]
    rest = sum(share for _, share in shares) - sum(share for _, share in long)
    return " ".join(f"{phase} {share:.0f}%" for phase, share in [*long, *([("other", rest)] if rest > 0.5 else [])])
