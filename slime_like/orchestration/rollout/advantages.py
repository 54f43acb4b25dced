"""Advantages from rewards: weights, overlong penalty, KL penalty and estimator."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from slime_like.algorithms.advantages import (
    AdvantageEstimator,
    Level,
    compute_advantages,
    find_estimator,
    kl_penalty,
    overlong_penalty,
)
from slime_like.algorithms.importance import configured_weights, log_ratio, mean_weight
from slime_like.config import AlgorithmConfig, RewardConfig, RunConfig
from slime_like.config.algorithm import KLRewardConfig
from slime_like.config.roles import REFERENCE, TEACHER
from slime_like.config.rollout import AGENT, ENVIRONMENT
from slime_like.errors import ConfigError, RewardError, TrainerError
from slime_like.interfaces import Scores
from slime_like.orchestration.rollout.rows import Rollout, rollouts_of, trained_spans, whiten
from slime_like.orchestration.trainer.model_ranks import ModelRanks
from slime_like.orchestration.trainer.rank import TrainerRank
from slime_like.plugins.resolve import format_error, naming
from slime_like.trajectory import ScoredTrajectory

_OF_TOKENS = ("logprobs", "values")


def weighted_rewards(reward: RewardConfig, rewards: Tensor) -> Tensor:
    """Return the (N,) weighted sums of (N, num_funcs) rewards, without penalties."""
    return rewards @ torch.tensor([function.weight for function in reward.functions], dtype=torch.float32)


class Advantages:
    """Advantages of a run's rollouts, computed from their rewards."""

    def __init__(self, config: RunConfig) -> None:
        self._reward = config.reward
        self._algorithm = config.algorithm
        self._max_new_tokens = config.rollout.max_new_tokens
        self._critic = config.critic if config.algorithm.needs_critic else None
        self._shuffle_seed = config.seed if config.debug.shuffle_advantages else None

    def totals(self, rewards: Tensor, response_lens: Sequence[int]) -> Tensor:
        """Return the (N,) input of the estimator: weighted rewards minus the overlong penalty.

        Args:
            rewards: (N, num_funcs), one row per rollout.
            response_lens: length of each rollout; see ``Rollout.length``.
        """
        totals = weighted_rewards(self._reward, rewards)
        buffer = self._algorithm.overlong.buffer
        if buffer is None:
            return totals
        limit, factor = self._max_new_tokens, self._algorithm.overlong.factor
        return totals + overlong_penalty(torch.tensor(response_lens), limit, buffer, factor)

    def of_rows(
        self,
        rollouts: Sequence[Rollout[Any]],
        rewards: Tensor,
        totals: Tensor,
        step: int,
        values: Mapping[str, Tensor] | None = None,
        extra: Tensor | float = 0.0,
    ) -> dict[str, Tensor]:
        """Return the advantages of rows by sequence id: the rollout's one, or (response_len,) with 0 on observations.

        Args:
            rewards: (N, num_funcs), one row per rollout.
            totals: (N,) weighted rewards with all penalties.
            values: (response_len,) of a critic, by sequence id. While they are missing, all advantages are 0.
            extra: rewards of turns or tokens besides ``totals``.

        Raises:
            RewardError: see ``of_step``.
        """
        rows = [row for rollout in rollouts for row in rollout.rows]
        if self._critic is not None and values is None:
            return {row.sequence_id: torch.zeros(()) for row in rows}
        found = self._of_rows(rollouts, self._given(rollouts, rewards, totals, values), totals, step, extra)
        return whiten(rows, found) if self._algorithm.whiten else found

    def _given(
        self,
        rollouts: Sequence[Rollout[Any]],
        rewards: Tensor,
        totals: Tensor,
        values: Mapping[str, Tensor] | None = None,
    ) -> dict[str, Tensor]:
        """Return what estimators may need. Penalties are one more function."""
        weights = torch.tensor([function.weight for function in self._reward.functions], dtype=rewards.dtype)
        penalties = (totals - rewards @ weights)[:, None]
        greedy = [rollout.last.greedy_reward for rollout in rollouts]
        sampled = [(row.logprobs, row.loss_mask) for rollout in rollouts for row in rollout.rows]
        given = {} if None in greedy else {"greedy": torch.tensor(greedy)}
        if "logprobs" in configured_estimator(self._algorithm.advantage.name).needs:
            given["logprobs"] = torch.cat([logprobs[mask] for logprobs, mask in sampled])
        if values is not None:
            rows = [row for rollout in rollouts for row in rollout.rows]
            given["values"] = torch.cat([values[row.sequence_id][row.loss_mask] for row in rows])
        return given | {
            "tokens": torch.tensor([rollout.sampled_len for rollout in rollouts]),
            "functions": torch.cat([rewards, penalties], dim=1),
            "weights": torch.cat([weights, weights.new_ones(1)]),
        }

    def _of_rows(
        self,
        rollouts: Sequence[Rollout[Any]],
        given: Mapping[str, Tensor],
        totals: Tensor,
        step: int,
        extra: Tensor | float = 0.0,
        options: Mapping[str, Any] | None = None,
    ) -> dict[str, Tensor]:
        """Return advantages by sequence id.

        Args:
            extra: rewards of turns or tokens besides ``totals``.
            options: of the estimator, instead of the configured ones; then nothing is shuffled.
        """
        group_ids = [rollout.group_id for rollout in rollouts]
        if (level := configured_estimator(self._algorithm.advantage.name).level) == "sample":
            found = self.of_step(totals, group_ids, step, given=given, options=options)
            return {row.sequence_id: one for rollout, one in zip(rollouts, found, strict=True) for row in rollout.rows}
        sizes = [torch.cat([_entry_sizes(row.loss_mask, level) for row in rollout.rows]) for rollout in rollouts]
        counts = torch.tensor(list(map(len, sizes)))
        starts = (counts.cumsum(0) - counts).tolist()
        times = [_in_time(rollout, level) for rollout in rollouts]
        rewards = torch.cat([self._entries(*each, level) for each in zip(rollouts, times, totals, strict=True)]) + extra
        order = torch.cat([start + time for start, time in zip(starts, times, strict=True)])
        given = {name: given[name][order] if name in _OF_TOKENS else given[name] for name in given}
        entries = torch.empty_like(rewards)
        entries[order] = self.of_step(rewards[order], group_ids, step, counts, given, options)
        tokens = entries.repeat_interleave(torch.cat(sizes))
        rows = [row for rollout in rollouts for row in rollout.rows]
        parts = zip(rows, tokens.split([row.sampled_len for row in rows]), strict=True)
        return {r.sequence_id: tokens.new_zeros(r.response_len).masked_scatter(r.loss_mask, p) for r, p in parts}

    def _entries(self, rollout: Rollout[Any], time: Tensor, total: Tensor, level: Level) -> Tensor:
        """Return the rewards of a rollout's turns or tokens: what the environment or agent gave for each turn, at its
        last token, and the rest at the end."""
        entries = total.new_zeros(len(time))
        if not len(time):
            return entries
        weight = sum(function.weight for function in self._reward.functions if function.name in (ENVIRONMENT, AGENT))
        ends = torch.cat([_entry_sizes(row.loss_mask, "turn") for row in rollout.rows]).cumsum(0) - 1
        given = [weight * reward for reward in rollout.turn_rewards[: len(ends)]] if weight else []
        for turn, reward in enumerate(given):
            entries[turn if level == "turn" else ends[turn]] = reward
        entries[time[-1]] += total - sum(given)
        return entries

    def of_step(
        self,
        totals: Tensor,
        group_ids: Sequence[int],
        step: int,
        lengths: Tensor | None = None,
        given: Mapping[str, Tensor] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """Return a step's advantages, like ``totals``. The estimator gets the whole step, whatever its scope.

        Raises:
            RewardError: the estimator, possibly a user's, failed or did not return one finite number per entry.
        """
        chosen = self._algorithm.advantage
        with naming(RewardError, "estimator-failed", "algorithm.advantage", chosen.name, "compute", f"step {step}"):
            used = chosen.options if options is None else options
            advantages = compute_advantages(totals, group_ids, chosen.name, lengths, given, **used)
        if self._shuffle_seed is not None and options is None:
            generator = torch.Generator().manual_seed(self._shuffle_seed * 1_000_003 + step)
            advantages = advantages[torch.randperm(len(advantages), generator=generator)]
        return advantages

    def of_scored(self, trajectories: Sequence[ScoredTrajectory], step: int) -> dict[str, Tensor]:
        """Return the advantages of a whole step by sequence id, computed again from its rewards."""
        return self.of_rows(*self._rewarded(trajectories), step)

    def penalize_kl(
        self, policy: ModelRanks, trajectories: Sequence[ScoredTrajectory], step: int, coefficient: float
    ) -> float:
        """Subtract each rollout's KL to the reference, summed over its rows, from its reward. Replace its advantage,
        also on the trainers. Return the mean KL of a rollout, in nats.

        The batch must be loaded and scored, so reference logprobs exist. Logprobs are frozen at the start of the step,
        so the penalty applies to the policy that sampled.
        """
        negative = self._kl(policy, trajectories)
        rollouts, rewards, totals = self._rewarded(trajectories)
        penalties = torch.stack([torch.stack([negative[row.sequence_id][1] for row in r.rows]).sum() for r in rollouts])
        totals += coefficient * penalties
        _replace(policy, trajectories, self.of_rows(rollouts, rewards, totals, step))
        return -float(penalties.mean())

    def of_values(
        self,
        policy: ModelRanks,
        trajectories: Sequence[ScoredTrajectory],
        values: Mapping[str, Tensor],
        step: int,
        coefficient: float,
    ) -> tuple[dict[str, Tensor], float]:
        """Replace advantages by those of a critic's ``values``, also on the trainers. Values and rewards are those of
        the policy that sampled; ``coefficient`` times the KL to the reference is subtracted at each token.

        Args:
            values: (response_len,) by sequence id.

        Returns:
            The values' targets in the same form, and the mean KL of a rollout in nats, 0 without a coefficient.
        """
        assert self._critic is not None
        rollouts, rewards, totals = self._rewarded(trajectories)
        rows = [row for rollout in rollouts for row in rollout.rows]
        extra: Tensor | float = 0.0
        kl = 0.0
        if coefficient > 0:
            negative = self._kl(policy, trajectories)
            extra = torch.cat([coefficient * negative[row.sequence_id][0][row.loss_mask] for row in rows])
            kl = -float(extra.sum()) / coefficient / len(rollouts)
        lam = {} if self._critic.lam is None else {"lam": self._critic.lam}
        given, options = self._given(rollouts, rewards, totals, values), self._algorithm.advantage.options | lam
        learned = self._of_rows(rollouts, given, totals, step, extra, options)
        targets = {name: values[name] + gain for name, gain in learned.items()}
        _replace(policy, trajectories, self.of_rows(rollouts, rewards, totals, step, values, extra))
        return targets, kl

    def _rewarded(self, trajectories: Sequence[ScoredTrajectory]) -> tuple[list[Rollout[Any]], Tensor, Tensor]:
        """Return the rollouts, their (N, num_funcs) rewards, and (N,) totals."""
        rollouts = rollouts_of(trajectories)
        rewards = torch.stack([rollout.last.rewards for rollout in rollouts])
        return rollouts, rewards, self.totals(rewards, [rollout.length for rollout in rollouts])

    def _kl(self, policy: ModelRanks, rows: Sequence[ScoredTrajectory]) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the negative KL to the reference at each token, and its sum, by sequence id."""
        frozen = _compared(policy, rows, "ref_logprobs", REFERENCE)
        estimator, found = self._algorithm.kl_reward.estimator, {}
        for row in rows:
            pair, length = frozen[row.sequence_id], torch.tensor([row.response_len])
            old, reference = pair["old_logprobs"], pair["ref_logprobs"]
            found[row.sequence_id] = kl_penalty(old, reference, row.loss_mask, length, 1.0, estimator)
        return found


def distill(
    policy: ModelRanks, trajectories: Sequence[ScoredTrajectory], coefficient: float
) -> dict[str | None, float]:
    """Add ``coefficient * log(pi_teacher / pi_old)`` to the advantage of every token that carries loss, also on the
    trainers: its expected gradient is that of the reverse KL at each position, given the tokens before it.

    The batch must be loaded and scored. Return the mean KL estimate of a token of each source, in nats; by ``None``,
    that of all tokens.
    """
    frozen = _compared(policy, trajectories, "teacher_logprobs", TEACHER)
    gains = defaultdict[str | None, list[Tensor]](list)
    for row in trajectories:
        gain = log_ratio(frozen[row.sequence_id]["teacher_logprobs"], frozen[row.sequence_id]["old_logprobs"])
        row.advantages = row.advantages + coefficient * torch.where(row.loss_mask, gain, 0.0)
        for source in {None, row.source}:
            gains[source].append(gain[row.loss_mask])
    given = {row.sequence_id: row.advantages.numpy() for row in trajectories}
    policy.call("receiving advantages", TrainerRank.set_tokens, "advantages", given)
    tokens = {source: torch.cat(found).double() for source, found in gains.items()}
    return {source: -float(found.mean()) for source, found in tokens.items() if len(found)}


def _compared(policy: ModelRanks, rows: Sequence[ScoredTrajectory], field: str, role: str) -> dict[str, Scores]:
    """Return the frozen scores ``old_logprobs`` and ``field``, which ``role`` gives. Every row must have both."""
    frozen = policy.stored_scores(rows, "old_logprobs", field)
    if any(field not in scores for scores in frozen.values()):
        raise TrainerError(
            f"the KL needs {field}, and a sequence has none",
            code=f"no-{role}-logprobs",
            remedy=f"train on rollouts that were saved with them, or set {role}.placement: trainer",
        )
    return frozen


def _replace(policy: ModelRanks, rows: Sequence[ScoredTrajectory], advantages: Mapping[str, Tensor]) -> None:
    """Replace the rows' advantages, also on the trainers."""
    for row in rows:
        row.advantages = advantages[row.sequence_id].expand(row.response_len)
    given = {name: values.numpy() for name, values in advantages.items()}
    policy.call("receiving advantages", TrainerRank.set_tokens, "advantages", given)


def _in_time(rollout: Rollout[Any], level: Level) -> Tensor:
    """Return the places of a rollout's turns or tokens in the order of sampling, which several rows may not follow."""
    spans = torch.cat([_entry_sizes(row.loss_mask, "turn") for row in rollout.rows])
    numbers = torch.tensor(rollout.calls or range(len(spans)))
    return (numbers if level == "turn" else numbers.repeat_interleave(spans)).argsort(stable=True)


def _entry_sizes(loss_mask: Tensor, level: Level) -> Tensor:
    """Return the number of tokens of each turn, or of each token, that carries loss."""
    if level == "token":
        return torch.ones(int(loss_mask.sum()), dtype=torch.int64)
    return torch.tensor([end - start for start, end in trained_spans(loss_mask)], dtype=torch.int64)


def configured_estimator(name: str) -> AdvantageEstimator:
    """Return the run's estimator. Raises ``ConfigError`` if it cannot be loaded."""
    try:
        return find_estimator(name)
    except Exception as error:
        raise ConfigError([f"{format_error('algorithm.advantage', name, error, 'compute')}; correct it"]) from error


def require_group_scope(name: str) -> None:
    """Require an estimator that compares within groups. Streaming needs advantages before the batch is complete.

    Raises:
        ConfigError: the estimator cannot be loaded or has another scope.
    """
    if (scope := configured_estimator(name).scope) != "group":
        raise ConfigError(
            [
                f"rollout.stream=true needs advantages before the batch is complete, and algorithm.advantage="
                f"{name} declares the scope {scope!r}; use one that compares within groups, or "
                "rollout.stream: false"
            ]
        )


def normalize_importance(algorithm: AlgorithmConfig, policy: ModelRanks, rows: Sequence[ScoredTrajectory]) -> None:
    """Have trainers divide importance weights by the batch's mean. The batch must be loaded and scored.

    Raises:
        TrainerError: a custom correction failed.
    """
    frozen = policy.stored_scores(rows, "old_logprobs")
    lengths = torch.tensor([row.response_len for row in rows])
    mask = torch.cat([row.loss_mask for row in rows])
    old = torch.cat([frozen[row.sequence_id]["old_logprobs"] for row in rows])
    behaviour = torch.cat([row.logprobs for row in rows if row.logprobs is not None])  # not None: engines sampled
    name = algorithm.importance.correction
    correcting = naming(TrainerError, "custom-loss-failed", "algorithm.importance.correction", name, "")
    with correcting if ":" in name else nullcontext():
        weights, _ = configured_weights(algorithm.importance, old, behaviour, mask, lengths)
    per_sequence = torch.tensor([row.token_weight for row in rows], dtype=torch.float64)
    mean = mean_weight(weights, mask, per_sequence.repeat_interleave(lengths))
    policy.call("dividing weights", TrainerRank.set_tokens, "mean_weights", {row.sequence_id: mean for row in rows})


_KL = "kl_reward_coef"


class KLCoefficient:
    """The coefficient of the KL in the reward, which may adapt (Ziegler et al., arXiv:1909.08593, section 2.2).

    Attributes:
        value: the coefficient of the next step.
    """

    def __init__(self, settings: KLRewardConfig) -> None:
        self._settings = settings
        self.value = settings.coef

    def adapt(self, kl: float) -> None:
        """Raise the coefficient if a step's ``kl`` is above the target, and lower it below, by at most a fifth of
        ``gain``."""
        if (target := self._settings.target) is not None:
            self.value *= 1 + self._settings.gain * min(0.2, max(-0.2, kl / target - 1))

    def state_dict(self) -> dict[str, Any]:
        return {} if self._settings.target is None else {_KL: self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a checkpoint's value. One without a target starts at the setting."""
        if self._settings.target is not None:
            self.value = state.get(_KL, self.value)
