"""Records with values that are easy to compute by hand."""

from dataclasses import fields, replace
from typing import Any

import torch

from slime_like.observability.records import PhaseTimes, RewardRecord, RolloutRecord, ScoringRecord, StepRecord
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


def phase_times() -> PhaseTimes:
    seconds = {"wait": 0.5, "generate": 4.0, "reward": 0.5, "score": 0.5, "train": 2.0, "sync": 0.4}
    return PhaseTimes(step_s=8.0, seconds=seconds, orchestration_s=0.1)


def reward_record() -> RewardRecord:
    """Weighted rewards differ in group 7, but not in group 8 (1 + 0, 0 + 2/2). Group 9 has one sample."""
    return RewardRecord(
        func_names=["math_verify", "length"],
        weights=[1.0, 0.5],
        rewards=[[1.0, 0.0], [0.0, 0.0], [1.0, 0.0], [0.0, 2.0], [1.0, 4.0]],
        successes=[[1, 0], [0, 0], [1, 0], [0, 1], [1, 1]],
        group_ids=[7, 7, 8, 8, 9],
    )


def rl_record() -> StepRecord:
    return StepRecord(
        updates=[
            grpo_stats(loss=1.0, old_gap_max=1e-7, engine_gap_max=0.5, learning_rate=1e-3, num_tokens=30, ratios=1.0),
            grpo_stats(loss=3.0, old_gap_max=0.2, engine_gap_max=0.25, learning_rate=2e-3, num_tokens=10, ratios=1.5),
        ],
        times=phase_times(),
        response_lengths=[10, 20, 30, 4, 16],
        packed_tokens=200,
        actual_tokens=150,
        shared_tokens=50,
        rewards=reward_record(),
        rollout=RolloutRecord(
            finish_reasons=["stop", "length", "length", "stop", "stop"],
            dropped_prompts=2,
            queue_size=3,
            staleness=[0, 2, 1, 0],
            turns=[1, 2, 2, 2, 1],
            rows=[1, 3, 1, 2, 1],
        ),
        scoring={"reference": ScoringRecord(total_s=2.0, model_running_s=0.5, response_tokens=80, total_tokens=150)},
        replay_buffer_size=64,
        weight_gather_s=0.2,
        probe_gap=1e-6,
        memory={"peak_rss (GiB)": 1.5, "peak_gpu (GiB)": 3.5},
    )


def mixed_record() -> StepRecord:
    """``rl_record`` with the sources of a mixture."""
    return replace(rl_record(), sources=["sums", "sums", "words", "words", "words"])


def sft_record() -> StepRecord:
    return StepRecord(
        updates=[grpo_stats(loss=2.0)], times=phase_times(), response_lengths=[3, 5], packed_tokens=20, actual_tokens=20
    )
