"""Rewards and advantages: groups of unscored trajectories become scored ones."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slime_like.config import RunConfig
from slime_like.config.rollout import ENVIRONMENT
from slime_like.interfaces import Conversation
from slime_like.orchestration.rollout.advantages import step_advantages, total_rewards
from slime_like.sandbox.rewards.pool import RewardItem, RewardOutcome, RewardPool
from slime_like.trajectory import GroupedUnscoredTrajectories, ScoredTrajectory, UnscoredTrajectory


@dataclass(frozen=True, slots=True)
class RewardedGroup:
    """A group with its rewards; its advantages may depend on the rest of the batch.

    Attributes:
        rewards, successes: (N, F) float32, one column per reward function.
        totals: (N,) float32, the rewards that advantages come from.
        reference: (response_len,) logprobs of each sample under the reference, where a worker has scored them.
    """

    group: GroupedUnscoredTrajectories
    rewards: Tensor
    successes: Tensor
    totals: Tensor
    metadata: list[dict[str, Any]]
    reference: list[Tensor] | None = None


class Scorer:
    """Computes rewards in worker processes, then advantages. Thread-safe."""

    def __init__(self, config: RunConfig, pool: RewardPool, tokenizer: Any) -> None:
        self._config = config
        self._pool = pool
        self._tokenizer = tokenizer
        self._names = [function.label for function in config.reward.functions]
        self._lock = threading.Lock()

    def outcomes(self, trajectories: Sequence[UnscoredTrajectory]) -> list[RewardOutcome]:
        """Results of all reward functions for every response, in order; of a conversation they get the last turn."""
        decode = self._tokenizer.batch_decode
        responses = decode([_judged_tokens(t) for t in trajectories], skip_special_tokens=True)
        prompts = {t.group_id: t.prompt_tokens for t in trajectories}
        texts = dict(zip(prompts, decode(list(prompts.values()), skip_special_tokens=False), strict=True))
        items = [
            RewardItem(prompt=texts[trajectory.group_id], response=response, answer=trajectory.answer)
            for trajectory, response in zip(trajectories, responses, strict=True)
        ]
        with self._lock:
            outcomes = self._pool.score(items, [trajectory.group_id for trajectory in trajectories])
        return [
            self._with_environment(outcome, trajectory.conversation)
            for outcome, trajectory in zip(outcomes, trajectories, strict=True)
        ]

    def rewards(self, groups: Sequence[GroupedUnscoredTrajectories]) -> list[RewardedGroup]:
        """Rewards and successes of all samples."""
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        outcomes = iter(self.outcomes(trajectories))
        return [self._rewarded(group, [next(outcomes) for _ in group.trajectories]) for group in groups]

    def scored(self, groups: Sequence[RewardedGroup], step: int) -> list[ScoredTrajectory]:
        """The trajectories of a step's whole batch with their advantages, in the order of the groups."""
        trajectories = [trajectory for rewarded in groups for trajectory in rewarded.group.trajectories]
        totals = torch.cat([rewarded.totals for rewarded in groups])
        advantages = step_advantages(self._config, totals, [t.group_id for t in trajectories], step)
        rewards = torch.cat([rewarded.rewards for rewarded in groups])
        successes = torch.cat([rewarded.successes for rewarded in groups])
        metadata = [entry for rewarded in groups for entry in rewarded.metadata]
        unscored = [None] * len(trajectories)
        references = [logprobs for rewarded in groups for logprobs in rewarded.reference or ()] or unscored
        return [
            ScoredTrajectory.of(
                trajectory,
                rewards=rewards[i],
                successes=successes[i],
                advantages=advantages[i],
                reward_metadata=metadata[i],
                ref_logprobs=references[i],
            )
            for i, trajectory in enumerate(trajectories)
        ]

    def _rewarded(self, group: GroupedUnscoredTrajectories, outcomes: Sequence[RewardOutcome]) -> RewardedGroup:
        rewards = torch.tensor([outcome.rewards for outcome in outcomes], dtype=torch.float32)
        successes = torch.tensor([outcome.successes for outcome in outcomes], dtype=torch.float32)
        totals = total_rewards(self._config, rewards, [t.response_len for t in group.trajectories])
        metadata = [
            self._metadata(outcome, trajectory.conversation)
            for outcome, trajectory in zip(outcomes, group.trajectories, strict=True)
        ]
        return RewardedGroup(group, rewards, successes, totals, metadata)

    def _with_environment(self, outcome: RewardOutcome, conversation: Conversation | None) -> RewardOutcome:
        """Insert the environment's reward among the computed ones; all are zero if the conversation failed."""
        if conversation is None:
            return outcome
        if conversation.failure is not None:
            zeros = (0.0,) * len(self._names)
            return RewardOutcome(zeros, zeros, dict(conversation.failure))
        if ENVIRONMENT not in self._names:
            return outcome
        at = self._names.index(ENVIRONMENT)
        failed = "reason" in outcome.metadata
        pair = (0.0, 0.0) if failed else (conversation.reward, float(conversation.success))
        rewards, successes = (
            (*values[:at], value, *values[at:])
            for values, value in zip((outcome.rewards, outcome.successes), pair, strict=True)
        )
        return RewardOutcome(rewards, successes, outcome.metadata)

    def _metadata(self, outcome: RewardOutcome, conversation: Conversation | None) -> dict[str, Any]:
        metadata = {"func_names": self._names, **outcome.metadata}
        if conversation is not None:
            steps = [dict(step) for step in conversation.metadata]
            metadata["conversation"] = {"turns": [list(turn) for turn in conversation.turns], "steps": steps}
        return metadata


def _judged_tokens(trajectory: UnscoredTrajectory) -> Tensor:
    """The tokens that reward functions get: without observations, which may contain the answer."""
    if trajectory.conversation is None:
        return trajectory.response_tokens
    start, end = trajectory.conversation.turns[-1]
    return trajectory.response_tokens[start:end]
