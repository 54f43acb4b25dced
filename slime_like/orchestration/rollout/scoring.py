"""Rewards and advantages, which turn groups of unscored trajectories into scored ones."""

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from slime_like.config import RunConfig
from slime_like.config.rollout import AGENT, ENVIRONMENT, OnFailure
from slime_like.errors import RewardError
from slime_like.interfaces import Conversation, Scores
from slime_like.orchestration.rollout.advantages import Advantages
from slime_like.orchestration.rollout.requests import turn_form
from slime_like.orchestration.rollout.rows import Rollout, rollouts_of, trained_spans
from slime_like.sandbox.rewards.pool import RewardItem, RewardOutcome, RewardPool
from slime_like.sandbox.rewards.thinking import without_opening
from slime_like.system.budget import HourlyBudget
from slime_like.system.spans import span
from slime_like.system.words import pluralize
from slime_like.trajectory import GroupedUnscoredTrajectories, ScoredTrajectory, UnscoredTrajectory

MAX_OUTAGES = 2
"""Steps within an hour whose failed groups are replaced although too many failed."""

OUTCOME, MASKED, RESAMPLED, ZEROED = "outcome", "masked", "resampled", "zeroed"
"""Key in the metadata of failed rollouts, and what became of them."""


@dataclass(frozen=True, slots=True)
class RewardedGroup:
    """A group with its rewards. Its advantages may depend on the rest of the batch.

    Rollouts that failed are not in it, unless ``on_failure`` is "zero". If fewer are left than the advantage estimator
    compares, or the greedy one failed, the group is empty.

    Attributes:
        rewards, successes: (N, F) float32 for N rollouts, one column per reward function.
        totals: (N,) float32 rewards that advantages are computed from.
        metadata: metadata of each row.
        scores: scores of each row by workers, as far as they have scored it.
        failed: last row of each rollout that is not in the group, with metadata.
        resamples: whether the group is to be sampled again.
    """

    group: GroupedUnscoredTrajectories
    rewards: Tensor
    successes: Tensor
    totals: Tensor
    metadata: list[dict[str, Any]]
    scores: list[Scores]
    failed: Sequence[ScoredTrajectory] = ()
    resamples: bool = False

    @property
    def zeroed(self) -> list[Mapping[str, Any]]:
        """Metadata of each rollout that failed and has reward 0."""
        found = {row.rollout_id: each for row, each in zip(self.group.trajectories, self.metadata, strict=True)}
        return [each for each in found.values() if each.get(OUTCOME) == ZEROED]


class Scorer:
    """Scorer that computes rewards in worker processes, then advantages. Thread-safe.

    Args:
        stops: tokens that end a response, besides EOS, which reward functions don't get; ``None`` if every special
            token does.
    """

    def __init__(
        self, config: RunConfig, pool: RewardPool, tokenizer: Any, stops: Collection[int] | None = None
    ) -> None:
        self._advantages = Advantages(config)
        self._pool = pool
        self._tokenizer = tokenizer
        self._form = turn_form(config.data, config.rollout.agent, tokenizer)
        self._stops = stops
        self._names = [function.label for function in config.reward.functions]
        self._fewest = 2 if config.algorithm.compares_samples and not config.distillation.is_set else 1
        rollout, reward = config.rollout, config.reward
        conversations = rollout.agent if rollout.agent.is_set else rollout.environment
        is_weighted = any(function.weight for function in reward.functions)  # otherwise no failure changes a reward
        self._on_failure: tuple[OnFailure, OnFailure] = (
            (reward.on_failure, conversations.on_failure) if is_weighted else ("zero", "zero")
        )
        self._lock = threading.Lock()  # guards the tokenizer

    def outcomes(self, groups: Sequence[GroupedUnscoredTrajectories]) -> list[RewardOutcome]:
        """Score every rollout with all reward functions, in order, a group's greedy one last. They get the judged turn,
        by default the last, or an agent's answer. Conversations that failed have no reward, and no function gets
        them."""
        every = [one for group in groups for one in rollouts_of([*group.trajectories, *group.greedy])]
        rollouts = [one for one in every if one.last.conversation is None or one.last.conversation.failure is None]
        prompt_tokens = [group.prompt_tokens for group in groups]
        with self._lock:
            turns = self._form.decode_turns(_judged_tokens(rollout, self._stops) for rollout in rollouts)
            responses = [
                _answer(rollout.last.conversation, turn) for rollout, turn in zip(rollouts, turns, strict=True)
            ]
            texts = self._tokenizer.batch_decode(prompt_tokens, clean_up_tokenization_spaces=False)
        prompts = {group.group_id: (text, group.whole_row) for group, text in zip(groups, texts, strict=True)}
        items = [
            RewardItem(prompt, without_opening(response, prompt), rollout.last.answer, row)
            for rollout, response in zip(rollouts, responses, strict=True)
            for prompt, row in [prompts[rollout.group_id]]
        ]
        with span("rewards/scoring", pluralize(len(items), "response")):
            outcomes = iter(self._pool.score(items, [rollout.group_id for rollout in rollouts]))
        return [self._with_environment(outcomes, rollout.last.conversation) for rollout in every]

    def rewards(self, groups: Sequence[GroupedUnscoredTrajectories]) -> list[RewardedGroup]:
        """Compute rewards and successes of all rollouts."""
        outcomes = iter(self.outcomes(groups) if groups else ())
        return [self._rewarded(group, outcomes) for group in groups]

    def scored(self, groups: Sequence[RewardedGroup], step: int) -> list[ScoredTrajectory]:
        """Return the trajectories of a step's whole batch with advantages, in group order.

        A rollout has one reward, shared by all its rows.
        """
        trajectories = [trajectory for rewarded in groups for trajectory in rewarded.group.trajectories]
        rollouts = rollouts_of(trajectories)
        places = {rollout.last.rollout_id: place for place, rollout in enumerate(rollouts)}
        totals = torch.cat([rewarded.totals for rewarded in groups])
        rewards = torch.cat([rewarded.rewards for rewarded in groups])
        advantages = self._advantages.of_rows(rollouts, rewards, totals, step)
        successes = torch.cat([rewarded.successes for rewarded in groups])
        metadata = [entry for rewarded in groups for entry in rewarded.metadata]
        scores = [entry for rewarded in groups for entry in rewarded.scores]
        return [
            ScoredTrajectory.of(
                trajectory,
                rewards=rewards[place],
                successes=successes[place],
                advantages=advantages[trajectory.sequence_id],
                reward_metadata=metadata[row],
                **scores[row],
            )
            for row, trajectory in enumerate(trajectories)
            for place in [places[trajectory.rollout_id]]
        ]

    def _rewarded(self, group: GroupedUnscoredTrajectories, outcomes: Iterator[RewardOutcome]) -> RewardedGroup:
        """Build the group with the next outcomes, one per rollout, and one of a greedy rollout."""
        rollouts, apart = rollouts_of(group.trajectories), rollouts_of(group.greedy)
        found = {rollout.last.rollout_id: next(outcomes) for rollout in [*rollouts, *apart]}
        failed = [rollout for rollout in [*rollouts, *apart] if found[rollout.last.rollout_id].failed]
        lost = {one.last.rollout_id: one for one in failed if self._on_failure_of(one) != "zero"}
        kept = [rollout for rollout in rollouts if rollout.last.rollout_id not in lost]
        if lost and (len(kept) < self._fewest or not lost.keys().isdisjoint(one.last.rollout_id for one in apart)):
            kept = []
        rows, of_kept = [row for rollout in kept for row in rollout.rows], [found[one.last.rollout_id] for one in kept]
        shape = len(kept), len(self._names)
        rewards = torch.tensor([outcome.rewards for outcome in of_kept], dtype=torch.float32).reshape(shape)
        successes = torch.tensor([outcome.successes for outcome in of_kept], dtype=torch.float32).reshape(shape)
        totals = self._advantages.totals(rewards, [rollout.length for rollout in kept])
        for greedy in apart:
            its = torch.tensor([found[greedy.last.rollout_id].rewards], dtype=torch.float32)
            for row in rows:
                row.greedy_reward = float(self._advantages.totals(its, [greedy.length]))
        return RewardedGroup(
            replace(group, trajectories=rows, total_tokens=sum(row.total_len for row in rows)),
            rewards,
            successes,
            totals,
            [self._metadata(found[row.rollout_id], row) for row in rows],
            [{} for _ in rows],
            [self._unrewarded(found[name], rollout.last) for name, rollout in lost.items()],
            any(self._on_failure_of(rollout) == "resample" for rollout in lost.values()),
        )

    def _on_failure_of(self, rollout: Rollout[UnscoredTrajectory]) -> OnFailure:
        conversation = rollout.last.conversation
        return self._on_failure[conversation is not None and conversation.failure is not None]

    def _unrewarded(self, outcome: RewardOutcome, row: UnscoredTrajectory) -> ScoredTrajectory:
        """Return a row that is not trained."""
        zeros, metadata = torch.zeros(len(self._names)), self._metadata(outcome, row)
        scores = {"rewards": zeros, "successes": zeros, "advantages": torch.tensor(0.0)}
        return ScoredTrajectory.of(row, **scores, reward_metadata=metadata)

    def _with_environment(self, outcomes: Iterator[RewardOutcome], conversation: Conversation | None) -> RewardOutcome:
        """Return the next outcome with the reward of the environment or agent. A failed conversation takes none, and
        gets only zeros."""
        if conversation is not None and conversation.failure is not None:
            zeros = (0.0,) * len(self._names)
            return RewardOutcome(zeros, zeros, dict(conversation.failure))
        outcome = next(outcomes)
        if conversation is None:
            return outcome
        at = next((index for index, name in enumerate(self._names) if name in (ENVIRONMENT, AGENT)), None)
        if at is None:
            return outcome
        failed = "reason" in outcome.metadata
        pair = (0.0, 0.0) if failed else (conversation.reward, float(conversation.success))
        rewards, successes = (
            (*values[:at], value, *values[at:])
            for values, value in zip((outcome.rewards, outcome.successes), pair, strict=True)
        )
        return RewardOutcome(rewards, successes, outcome.metadata)

    def _metadata(self, outcome: RewardOutcome, row: UnscoredTrajectory) -> dict[str, Any]:
        metadata = {"func_names": self._names, **outcome.metadata, **({OUTCOME: ZEROED} if outcome.failed else {})}
        if row.conversation is not None:
            steps = [dict(step) for step in row.conversation.metadata]
            turns = [list(turn) for turn in row.conversation.turns]
            rewards = [] if row.conversation.failure else list(row.conversation.rewards)
            calls = {"calls": list(row.conversation.calls)} if row.conversation.calls else {}
            metadata["conversation"] = {"turns": turns, "steps": steps, "rewards": rewards, **calls}
        elif not row.loss_mask.all():
            metadata["conversation"] = {"turns": [list(span) for span in trained_spans(row.loss_mask)], "steps": []}
        return metadata


def _answer(conversation: Conversation | None, turn: str) -> str:
    return turn if conversation is None or conversation.answer is None else conversation.answer


def _judged_tokens(
    rollout: Rollout[UnscoredTrajectory], stops: Collection[int] | None
) -> tuple[list[int], list[int], Collection[int] | None]:
    """Return the tokens before the turn that reward functions get, the turn's, and the stop tokens that may end it.

    Observations may contain the answer, and are before the turn.
    """
    row = rollout.last
    turns = trained_spans(row.loss_mask) if row.conversation is None else row.conversation.turns
    at = -1 if row.conversation is None else row.conversation.judged
    start, end = turns[at] if turns else (0, row.response_len)
    prompt, response = row.prompt_tokens.tolist(), row.response_tokens.tolist()
    stops = () if rollout.finish_reason in ("length", "abort") else stops
    return prompt + response[:start], response[start:end], stops


def by_reason(reasons: Sequence[str]) -> str:
    """Count responses without a reward by reason: "3 by error, 1 by timeout"."""
    return ", ".join(f"{reasons.count(reason)} by {reason}" for reason in sorted(set(reasons)))


def failure_text(metadata: Iterable[Mapping[str, Any]]) -> str:
    """Format ``by_reason`` of the failed responses with the detail of the first one, or with its function."""
    failed = [entry for entry in metadata if "reason" in entry]
    details = [entry.get("detail") or entry["function"] for entry in failed if entry.keys() & {"detail", "function"}]
    return by_reason([entry["reason"] for entry in failed]) + (f", first: {details[0]}" if details else "")


@dataclass(slots=True)
class StepFailures:
    """Failed rollouts and dropped groups of the step whose batch is being formed.

    Attributes:
        step_rollouts: number of rollouts of a step.
        max_fraction, max_drops: ``reward.max_failed_fraction``, ``rollout.max_drops_per_step``.
        untrained: failed rollouts that are not trained, by their last row, since they were last taken.
        rollouts, failures: all rollouts since a batch was last formed, without those to be sampled again, and metadata
            of those that failed.
        dropped: groups dropped since a batch was last formed.
        outages: budget of steps with too many failures, once a batch was formed. ``news``: a sentence about each.
    """

    step_rollouts: int
    max_fraction: float
    max_drops: int
    untrained: list[ScoredTrajectory] = field(default_factory=list)
    rollouts: int = 0
    failures: list[Mapping[str, Any]] = field(default_factory=list)
    dropped: int = 0
    outages: HourlyBudget = field(default_factory=lambda: HourlyBudget(0))
    news: list[str] = field(default_factory=list)

    def form(self) -> None:
        """Begin to count for the next step, unless its rollouts are counted along with this one's: sampling ahead."""
        self.dropped, self.outages.limit = 0, MAX_OUTAGES
        if self.rollouts >= self.step_rollouts:
            self.rollouts, self.failures = 0, []

    def check(self) -> bool:
        """Return whether too many rollouts have failed, of at least as many as a step has: other prompts must replace
        the groups with failures. Raise ``RewardError`` if that happens too often."""
        failed = len(self.failures)
        if self.rollouts < self.step_rollouts or failed <= self.max_fraction * self.rollouts:
            return False
        problem = (
            f"{failed} of {pluralize(self.rollouts, 'rollout')} for one step failed "
            f"({failure_text(self.failures)}), more than reward.max_failed_fraction={self.max_fraction:g}"
        )
        if not self.outages.use():
            remedy = "correct what failed, or raise the fraction"
            raise RewardError(problem, code="too-many-failures", remedy=remedy)
        count = f"outage {self.outages.used} of {MAX_OUTAGES} within an hour"
        self.news.append(f"{problem}; other prompts replace their groups ({count})")
        self.rollouts, self.failures = 0, []
        return True

    def drop(self, reason: str) -> None:
        """Count a dropped group. Raise ``RewardError`` if there are too many."""
        self.dropped += 1
        if self.dropped > self.max_drops:
            raise RewardError(
                f"{self.dropped} groups for one step were dropped, the last one because of {reason}, more "
                f"than rollout.max_drops_per_step={self.max_drops}",
                code="too-many-drops",
                remedy="choose prompts that are neither always nor never solved, or set rollout.drop_zero_spread=false",
            )
