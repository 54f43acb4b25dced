"""Advantages from rewards: weights, overlong penalty, KL penalty and estimator."""

from collections.abc import Sequence

import torch
from torch import Tensor

from slime_like.algorithms.advantages import compute_advantages, find_estimator
from slime_like.algorithms.importance import configured_weights, mean_weight
from slime_like.algorithms.shaping import kl_penalty, overlong_penalty
from slime_like.config import RunConfig
from slime_like.errors import ConfigError, RewardError, TrainerError
from slime_like.orchestration.rollout.rows import rollouts_of
from slime_like.orchestration.trainer.calls import RankCalls
from slime_like.orchestration.trainer.rank_training import RankTraining
from slime_like.orchestration.trainer.scoring import frozen_logprobs
from slime_like.plugins.traceback import format_error, full_traceback
from slime_like.trajectory import ScoredTrajectory


def weighted_rewards(config: RunConfig, rewards: Tensor) -> Tensor:
    """Return the (N,) weighted sums of (N, num_funcs) rewards, without penalties."""
    return rewards @ torch.tensor([function.weight for function in config.reward.functions], dtype=torch.float32)


def total_rewards(config: RunConfig, rewards: Tensor, response_lens: Sequence[int]) -> Tensor:
    """Return the (N,) input of the estimator: weighted rewards minus the overlong penalty.

    Args:
        rewards: (N, num_funcs), one row per rollout.
        response_lens: length of each rollout; see ``Rollout.length``.
    """
    totals = weighted_rewards(config, rewards)
    buffer = config.algorithm.overlong_buffer
    if buffer is None:
        return totals
    limit, factor = config.rollout.max_new_tokens, config.algorithm.overlong_factor
    return totals + overlong_penalty(torch.tensor(response_lens), limit, buffer, factor)


def step_advantages(config: RunConfig, totals: Tensor, group_ids: Sequence[int], step: int) -> Tensor:
    """Return the (N,) advantages of a step's rollouts. The estimator gets the whole step, whatever its scope.

    Raises:
        RewardError: the estimator, possibly a user's, failed or did not return one finite number per rollout.
    """
    name = config.algorithm.advantage
    try:
        advantages = compute_advantages(totals, group_ids, name, eps=config.algorithm.advantage_eps)
    except Exception as error:
        raise RewardError(
            _format_error(name, error),
            code="estimator-failed",
            who=f"step {step}",
            remedy="correct it",
            users_traceback=full_traceback(error),
        ) from error
    if config.debug.shuffle_advantages:
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + step)
        advantages = advantages[torch.randperm(len(advantages), generator=generator)]
    return advantages


def require_group_scope(config: RunConfig) -> None:
    """Require an estimator that compares within groups. Streaming needs advantages before the batch is complete.

    Raises:
        ConfigError: the estimator cannot be loaded or has another scope.
    """
    name = config.algorithm.advantage
    try:
        scope = find_estimator(name).scope
    except Exception as error:
        raise ConfigError([f"{_format_error(name, error)}; correct it"]) from error
    if scope != "group":
        raise ConfigError(
            [
                f"rollout.stream=true needs advantages before the batch is complete, and algorithm.advantage={name} "
                f"declares the scope {scope!r}; use one that compares within groups, or rollout.stream: false"
            ]
        )


def _format_error(name: str, error: Exception) -> str:
    return format_error("algorithm.advantage", name, error, "compute")


def penalise_kl(config: RunConfig, ranks: RankCalls, trajectories: Sequence[ScoredTrajectory], step: int) -> None:
    """Subtract each rollout's KL to the reference, summed over its rows, from its reward. Replace its advantage, also
    on the trainers.

    The batch must be loaded and scored, so reference logprobs exist. Logprobs are frozen at the start of the step, so
    the penalty applies to the policy that sampled.
    """
    algorithm = config.algorithm
    frozen = frozen_logprobs(ranks, [trajectory.sequence_id for trajectory in trajectories])
    penalties = {
        trajectory.sequence_id: kl_penalty(
            scored.policy,
            scored.required_reference,
            trajectory.loss_mask,
            torch.tensor([trajectory.response_len]),
            algorithm.kl_reward_coef,
            algorithm.kl_reward_estimator,
        )[1]
        for trajectory, scored in ((t, frozen[t.sequence_id]) for t in trajectories)
    }
    rollouts = rollouts_of(trajectories)
    rewards = torch.stack([rollout.last.rewards for rollout in rollouts])
    totals = total_rewards(config, rewards, [rollout.length for rollout in rollouts])
    totals += torch.stack([torch.stack([penalties[row.sequence_id] for row in r.rows]).sum() for r in rollouts])
    advantages = step_advantages(config, totals, [rollout.group_id for rollout in rollouts], step)
    for rollout, advantage in zip(rollouts, advantages, strict=True):
        for row in rollout.rows:
            row.advantages = advantage.clone()
    replaced = {t.sequence_id: float(t.advantages) for t in trajectories}
    ranks.call("receiving advantages", RankTraining.set_advantages, replaced)


def normalise_importance(config: RunConfig, ranks: RankCalls, trajectories: Sequence[ScoredTrajectory]) -> None:
    """Divide advantages on the trainers by the batch's mean importance weight. The batch must be loaded and scored.

    All built-in policy terms are proportional to positive factors of advantages, so this normalizes the weights.

    Raises:
        TrainerError: a custom correction failed.
    """
    frozen = frozen_logprobs(ranks, [trajectory.sequence_id for trajectory in trajectories])
    lengths = torch.tensor([trajectory.response_len for trajectory in trajectories])
    mask = torch.cat([trajectory.loss_mask for trajectory in trajectories])
    old = torch.cat([frozen[trajectory.sequence_id].policy for trajectory in trajectories])
    behaviour = torch.cat([t.logprobs for t in trajectories if t.logprobs is not None])  # not None: engines sampled
    name = config.algorithm.importance_correction
    try:
        weights = configured_weights(config.algorithm, old, behaviour, mask, lengths).weights
    except Exception as error:
        if ":" not in name:
            raise
        raise TrainerError(
            format_error("algorithm.importance_correction", name, error, ""),
            code="custom-loss-failed",
            remedy="correct it",
            users_traceback=full_traceback(error),
        ) from error
    per_sequence = torch.tensor([trajectory.token_weight for trajectory in trajectories], dtype=torch.float64)
    mean = mean_weight(weights, mask, per_sequence.repeat_interleave(lengths))
    replaced = {t.sequence_id: float(t.advantages) / mean for t in trajectories}
    ranks.call("receiving advantages", RankTraining.set_advantages, replaced)
