"""Names of metrics that several parts read, and figures of a step on the screen. Seconds are wall time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from slime_like.observability.timing import ORCHESTRATION, PHASES

if TYPE_CHECKING:
    from slime_like.statistics import StepStats

PERFORMANCE = "train_actor_performance"
STEP_TIME = f"{PERFORMANCE}/total_step_time (s)"
REWARD = "ref_actor_rewards/total_reward_mean"
LOSS = "train_actor_training/loss"
KL = "train_actor_training/kl_loss"
ACCURACY = "evaluation/accuracy"
FAILURES = "ref_actor_rewards/scoring_failures"
HELD_OUT_FAILURES = "evaluation/scoring_failures"
IDLE_TIME = f"{PERFORMANCE}/time_idle (s)"
IDLE_SHARE, WAITING_SHARE = f"{PERFORMANCE}/pct_time_idle (%)", f"{PERFORMANCE}/pct_time_waiting_buffer (%)"
ROLLOUT_SPEED = "rollout/tokens_per_second"
SCORING_SPEED = "score/tokens_per_second"
CONVERSION_SPEED = "convert/gigabytes_per_second"

FLAT_GROUPS = "rollout/zero_spread_groups"
GROUPS = "rollout/groups"
TURN_LIMIT = "rollout/turn_limit_fraction"
LENGTH = "rollout/response_length_mean"
TRUNCATED, ABORTED = "rollout/truncated_fraction", "rollout/aborted_fraction"
REPEATED, ZERO_ADVANTAGES = "rollout/repeated_fraction", "rollout/zero_advantage_fraction"
FAILED = "ref_actor_rewards/failed_fraction"
IDLE_ENGINES = "rollout/pct_time_idle (%)"
ENTROPY = "train_actor_training/entropy"
PERPLEXITY, ENGINE_PERPLEXITY = "train_actor_training/perplexity", "train_actor_training/engine_perplexity"
EXPLAINED_VARIANCE = "train_critic/explained_variance"
REWARD_OF = "ref_actor_rewards/rewards_func_"
SOURCES, SOURCE_REWARD = "sources/", "/total_reward_mean"

_SHOWN_SHARE = 10.0

_NOT_MEANS = {"old_gap_max", "engine_gap_max", "learning_rate", "num_tokens", "metadata", "source_kls"}


def phase_seconds(phase: str) -> str:
    """Return the name of the seconds spent in ``phase``, one of ``PHASES`` or ``ORCHESTRATION``."""
    return f"phases/{phase} (s)"


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


def source_kls(updates: Sequence[Mapping[Any, float]]) -> dict[str, float]:
    """Return the mean KL to each source's teacher over the optimizer steps with tokens of it."""
    each = {name: [kls[name] for kls in updates if name in kls] for kls in updates for name in kls}
    return {f"{SOURCES}{name}/distillation_kl": float(np.mean(found)) for name, found in each.items()}


def scoring_metrics(
    role: str, total_s: float, running_s: float, response_tokens: int, total_tokens: int
) -> dict[str, float]:
    """Return the work of a role besides the policy. Two names are in use for its step time.

    Args:
        total_s, running_s: seconds of the step, and of scoring in it. The rest is waiting.
        response_tokens, total_tokens: scored tokens, without and with prompts.
    """
    prefix = f"{'ref_actor' if role == 'reference' else role}_performance"
    return {
        f"{prefix}/time_total_ref_step (s)": total_s,
        f"{prefix}/total_rollout_time (s)": total_s,
        **time_metrics(prefix, "model_running", running_s, total_s),
        **time_metrics(prefix, "waiting_buffer", max(0.0, total_s - running_s), total_s),
        f"{prefix}/response_tokens_processed": float(response_tokens),
        f"{prefix}/total_tokens_processed": float(total_tokens),
        f"{prefix}/tokens_per_second": ratio(response_tokens, running_s),
    }


def phase_metrics(seconds: Mapping[str, float], busy_s: float | None = None) -> dict[str, float]:
    """Return the step's time by phase, in seconds, and in percent where that is of interest.

    Args:
        seconds: of ``PhaseClock.finish``.
        busy_s: seconds that trainer ranks worked on streamed samples, in any phase; ``None`` if they worked only in the
            phase "train".
    """
    step_s = sum(seconds.values())
    idle = seconds["wait"] + seconds["generate"] + seconds["reward"]
    if busy_s is not None:  # from a sync's end to the update's end, minus the ranks' work
        idle = max(0.0, idle + seconds["train"] - busy_s)
    return {
        STEP_TIME: step_s,
        **time_metrics(PERFORMANCE, "grpo_steps", seconds["train"], step_s),
        **time_metrics(PERFORMANCE, "weight_sync", seconds["sync"], step_s),
        **time_metrics(PERFORMANCE, "waiting_buffer", seconds["wait"], step_s),
        **time_metrics(PERFORMANCE, "idle", idle, step_s),
        **{phase_seconds(phase): value for phase, value in seconds.items()},
        "phases/orchestration (%)": 100 * ratio(seconds[ORCHESTRATION], step_s),
    }


def time_metrics(prefix: str, name: str, seconds: float, total_s: float) -> dict[str, float]:
    """Return a time in seconds, and as percent of ``total_s``."""
    return {f"{prefix}/time_{name} (s)": seconds, f"{prefix}/pct_time_{name} (%)": 100 * ratio(seconds, total_s)}


def ratio(numerator: float, denominator: float) -> float:
    """Return the quotient, or 0 without a denominator."""
    return numerator / denominator if denominator > 0 else 0.0


# Metric, label, format. Metrics that a run does not have are not shown.
FIGURES = (
    (STEP_TIME, "step time", "{:.2f} s"),
    (LOSS, "loss", "{:.4g}"),
    (REWARD, "reward", "{:.3f}"),
    (ACCURACY, "accuracy", "{:.3f}"),
    (LENGTH, "response tokens", "{:.0f}"),
    (TRUNCATED, "cut off", "{:.0%}"),
    (TURN_LIMIT, "out of turns", "{:.0%}"),
    (FLAT_GROUPS, "flat groups", "{:.0f}"),
    (KL, "KL", "{:.3g}"),
    (ENTROPY, "entropy", "{:.2f}"),
    ("train_actor_training/grad_norm", "grad norm", "{:.3g}"),
    (ROLLOUT_SPEED, "rollout tokens/s", "{:,.0f}"),
    (SCORING_SPEED, "tokens/s", "{:,.0f}"),
    (CONVERSION_SPEED, "GB/s", "{:.2f}"),
)


def format_metrics(values: Mapping[str, float], evaluated: str = "") -> list[tuple[str, str]]:
    """Return (label, formatted value) of the metrics in ``values``, in the order of ``FIGURES``.

    If there are several reward functions, their means follow the weighted sum. With a reward, the loss is left out,
    because it is almost 0 on-policy. A KL of 0 (no reference) and a turn limit that was never reached are left out too.

    Args:
        evaluated: text after the accuracy, e.g. its step.
    """
    shown = []
    for name, label, form in FIGURES:
        hidden = (name == LOSS and REWARD in values) or (name in (KL, TURN_LIMIT) and not values.get(name))
        if name in values and not hidden:
            after = {ACCURACY: evaluated, FLAT_GROUPS: f"/{values[GROUPS]:.0f}" if GROUPS in values else ""}
            shown.append((label, form.format(values[name]) + after.get(name, "")))
        if name == REWARD:
            shown += [(function, form.format(values[mean])) for mean, function in function_means(values)]
    return shown


def function_means(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return (metric, reward function) for each function's mean reward in ``names``; empty if there is only one."""
    found = _between(REWARD_OF, names, "_mean")
    return found if len(found) > 1 else []


def source_means(names: Iterable[str]) -> list[tuple[str, str]]:
    """Return (metric, source) for the mean reward of each source in ``names``."""
    return _between(SOURCES, names, SOURCE_REWARD)


def _between(prefix: str, names: Iterable[str], suffix: str) -> list[tuple[str, str]]:
    found = [name for name in names if name.startswith(prefix) and name.endswith(suffix)]
    return [(name, name.removeprefix(prefix).removesuffix(suffix)) for name in found]


def phase_shares(values: Mapping[str, float]) -> list[tuple[str, float]]:
    """Return (phase, percent of all phases' time) for every phase that took any time, orchestration last."""
    seconds = {phase: values.get(phase_seconds(phase), 0.0) for phase in (*PHASES, ORCHESTRATION)}
    total = sum(seconds.values())
    return [(phase, 100 * value / total) for phase, value in seconds.items() if value > 0]


def phases_text(shares: Sequence[tuple[str, float]]) -> str:
    """Format the ``phase_shares`` of a tenth or more, and the sum of all others as "other"."""
    long = [(phase, share) for phase, share in shares if share >= _SHOWN_SHARE]
    rest = sum(share for _, share in shares) - sum(share for _, share in long)
    return " ".join(f"{phase} {share:.0f}%" for phase, share in [*long, *([("other", rest)] if rest > 0.5 else [])])
