"""Table of the groups that are issued and not yet in a batch, with their stages. The ledger records every change."""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime_like.config import RunConfig
from slime_like.data.ledger import DROPPED, FAILED, ISSUED, REISSUED, SCORED, Ledger
from slime_like.data.prompts import Prompt, PromptSource
from slime_like.interfaces import GenerationRequest
from slime_like.orchestration.rollout.advantages import weighted_rewards
from slime_like.orchestration.rollout.issue import PromptQueue, StalenessGate
from slime_like.orchestration.rollout.scoring import MASKED, OUTCOME, RESAMPLED, RewardedGroup, StepFailures
from slime_like.trajectory import ScoredTrajectory

GENERATE, REWARD, REWARDED, SCORE, READY = "generate", "reward", "rewarded", "score", "ready"

_MAX_RESAMPLES = 2
"""Number of times that a group is sampled again because rollouts failed."""
_LOOK_EVERY_S = 0.2


@dataclass(eq=False, slots=True)
class Group:
    """A group from its issue until a batch takes it.

    Attributes:
        version: earliest weight version that may sample its first token.
        sampled_at: monotonic time at which it was last sampled.
        stage: ``GENERATE``, ``REWARD``, ``REWARDED``, ``SCORE`` (by workers of roles), or ``READY``.
        resamples: number of times that it was sampled again because rollouts failed.
        task: its way to ``READY``.
        accepted: whether it is trained; known once it and others of the step are rewarded.
    """

    prompt: Prompt
    request: GenerationRequest
    version: int
    stage: str = GENERATE
    sampled_at: float = 0.0
    resamples: int = 0
    task: asyncio.Task[None] | None = field(init=False, default=None, repr=False)
    accepted: asyncio.Future[bool] = field(init=False, repr=False)
    rewarded: RewardedGroup = field(init=False, repr=False)


class GroupTable:
    """Table of groups. The training loop and the groups' tasks change it. Thread-safe.

    Args:
        begin: starts the tasks of groups that are issued together.
        has_roles: whether workers of roles score rewarded groups.

    Attributes:
        changed: guards the state; notified when the training loop may continue.
        gate: served version and position of the batches.
        failures: failures of the step. ``error`` is what ended the tasks.
        takes_all: whether a batch waits until all of its groups are rewarded, and takes them together.
    """

    def __init__(
        self,
        config: RunConfig,
        prompts: PromptSource,
        ledger: Ledger,
        begin: Callable[[Sequence[Group]], None],
        has_roles: bool,
    ) -> None:
        rollout = config.rollout
        rollouts = rollout.prompts_per_step * rollout.samples_per_prompt
        self.config = config
        self.prompts = PromptQueue(config, prompts)
        self.ledger = ledger
        self.gate = StalenessGate(rollout.prompts_per_step, rollout.max_staleness, config.steps, rollout.oversample)
        self.changed = threading.Condition()
        self.failures = StepFailures(rollouts, config.reward.max_failed_fraction, rollout.max_drops_per_step)
        self.error: BaseException | None = None
        self.takes_all = not (rollout.max_staleness or rollout.stream or has_roles)
        self._begin = begin
        self._after_rewards = SCORE if has_roles else READY
        self._groups: dict[int, Group] = {}  # by group id, in order of arrival at their stage
        self._asked = config.steps if rollout.max_staleness else 0  # last step whose groups may be issued

    # ---------------------------------------------------------------------------------------------------------- issue
    def serve(self, version: int) -> None:
        """Record that the engines serve ``version``."""
        with self.changed:
            self.gate.serve(version)
            self._issue()

    def ask_for(self, step: int) -> None:
        """Allow the groups of ``step`` to be issued."""
        with self.changed:
            self._asked = max(self._asked, step)
            self._issue()

    def close(self) -> None:
        """Issue no more groups."""
        self._asked = 0

    def _issue(self) -> None:
        """Issue as many prompts as the staleness bound allows. Called under ``changed``."""
        if self.gate.formed >= self._asked:
            return
        version = self.gate.version
        prompts, restored = self.prompts.take(self.gate.may_issue(len(self._groups)))
        if not (groups := [Group(prompt, request, version) for prompt, request in prompts]):
            return
        ids = [group.prompt.group_id for group in groups]
        self.ledger.add(ids[restored:], ISSUED, version=version)
        self.ledger.add(ids[:restored], REISSUED, version=version, reason="resumed")
        self._groups |= dict(zip(ids, groups, strict=True))
        self._begin(groups)  # together: engines get them as a batch

    def reissue(self, group: Group, reason: str) -> None:
        """Record that the group is sampled again, with the same request."""
        self.ledger.add([group.prompt.group_id], REISSUED, version=self.gate.version, reason=reason)

    # --------------------------------------------------------------------------------------------------------- stages
    def move(self, groups: Sequence[Group], stage: str, event: str | None = None, version: int | None = None) -> None:
        """Move groups to a stage, and record ``event``."""
        ids = [group.prompt.group_id for group in groups]
        with self.changed:
            if event is not None:
                self.ledger.add(ids, event, version=version)
            sampled = any(group.stage == GENERATE for group in groups)
            for group in groups:
                group.sampled_at = time.monotonic() if group.stage == GENERATE else group.sampled_at
                group.stage = stage
                self._groups[group.prompt.group_id] = self._groups.pop(group.prompt.group_id)
            if stage == READY or (sampled and not self.at(GENERATE)):  # what the training loop may wait for
                self.changed.notify_all()

    def settle(self, group: Group, rewarded: RewardedGroup) -> bool:
        """Give a group its rewards, and return True. Return False if it is to be sampled again: with the same request,
        so that a run that was disturbed trains what it would have trained."""
        again = rewarded.resamples and group.resamples < _MAX_RESAMPLES
        for row in rewarded.failed:
            row.reward_metadata[OUTCOME] = RESAMPLED if again else MASKED
        failures = [*(row.reward_metadata for row in rewarded.failed), *rewarded.zeroed]
        with self.changed:
            for each in failures:
                self.ledger.add([group.prompt.group_id], FAILED, reason=f"{each[OUTCOME]}: {each['reason']}")
            self.failures.untrained += rewarded.failed
            if again:
                self.move([group], GENERATE)
                group.version, group.resamples = self.gate.version, group.resamples + 1
                self.reissue(group, "failed")
            else:
                group.rewarded = rewarded
                self.failures.rollouts += group.request.num_samples + group.request.greedy
                self.failures.failures += failures
                self.move([group], REWARDED)
        return not again

    def accept(self) -> None:
        """Decide which rewarded groups are trained, and issue others in place of the rest.

        If the batch waits for all groups, this waits until enough of them are rewarded.
        """
        with self.changed:
            rewarded = self.at(REWARDED)
            if self.takes_all and len(rewarded) < self.gate.room - len(self.at(READY)):
                return
            is_outage = self.failures.check()
            reasons = {group: self._reason_to_drop(group.rewarded, is_outage) for group in rewarded}
            at_end = self._after_rewards == READY
            self.ledger.add([each.prompt.group_id for each, reason in reasons.items() if reason or at_end], SCORED)
            for group, reason in reasons.items():
                if reason is not None:
                    self.ledger.add([group.prompt.group_id], DROPPED, reason=reason)
                    del self._groups[group.prompt.group_id]
                    self.failures.drop(reason)
                group.accepted.set_result(reason is None)
                group.stage = self._after_rewards
            self._issue()
            self.changed.notify_all()

    def _reason_to_drop(self, rewarded: RewardedGroup, is_outage: bool) -> str | None:
        """Return why the group has no training signal, or is lost to an outage, if so."""
        if not rewarded.group.trajectories or (is_outage and (rewarded.failed or rewarded.zeroed)):
            return "failures"
        rewards = weighted_rewards(self.config.reward, rewarded.rewards)  # differing lengths don't make a group useful
        is_flat = float(rewards.max() - rewards.min()) <= self.config.algorithm.least_spread
        return "zero spread" if self.config.rollout.drop_zero_spread and is_flat else None

    def fail(self, error: BaseException) -> None:
        """Have ``take`` raise the first such error."""
        with self.changed:
            self.error = self.error or error
            self.changed.notify_all()

    def drop_all(self, reason: str) -> None:
        """Drop all groups, wherever they are. Their tasks must have ended."""
        with self.changed:
            self.ledger.add(sorted(self._groups), DROPPED, reason=reason)
            self._groups.clear()

    # ---------------------------------------------------------------------------------------------------------- batch
    @property
    def phase(self) -> str:
        """The clock phase in which the training loop waits."""
        if self.config.rollout.max_staleness:
            return "wait"
        return "generate" if self.at(GENERATE) else "reward"

    def take(self, at_least: int) -> list[RewardedGroup]:
        """Wait a moment for groups. Return all that the batch may take, in id order, or none if there are fewer than
        ``at_least``, or the phase has changed."""
        phase = self.phase
        with self.changed:
            self.changed.wait_for(lambda: self.error or self._may_take(at_least) or self.phase != phase, _LOOK_EVERY_S)
            if self.error is not None:
                raise self.error
            count = self._may_take(at_least)
            oldest_first = sorted(self.at(READY), key=lambda group: group.version)
            formed = self.gate.formed
            self.gate.take(count)
            if self.gate.formed > formed:
                self.failures.form()
            taken = sorted(group.prompt.group_id for group in oldest_first[:count])
            return [self._groups.pop(group_id).rewarded for group_id in taken]

    def _may_take(self, at_least: int) -> int:
        """Return the number of ready groups that the batch may take now, or 0 if there are fewer than ``at_least``."""
        ready = [group.version for group in self.at(READY)]
        if len(ready) < at_least:
            return 0
        under_way = [group.version for group in self._groups.values() if group.stage != READY]
        count = self.gate.may_take(ready, under_way)
        return count if count >= at_least else 0

    # ------------------------------------------------------------------------------------------------------- position
    def at(self, *stages: str) -> list[Group]:
        """Return the groups at these stages, by default at any, in order of arrival."""
        with self.changed:
            return [group for group in self._groups.values() if not stages or group.stage in stages]

    def sampled(self) -> int:
        """Return the number of groups of the next batch that are already sampled."""
        with self.changed:
            return self.gate.taken + min(self.gate.room, len(self._groups) - len(self.at(GENERATE)))

    def take_failed(self) -> list[ScoredTrajectory]:
        """Return the failed rollouts that are not trained, by their last row, since the last call."""
        with self.changed:
            taken, self.failures.untrained = self.failures.untrained, []
            return taken

    def state_dict(self) -> dict[str, Any]:
        """Return the positions of prompts and ledger, and the prompts that were issued but not trained, for JSON.

        More may be issued before the ledger is copied: events after ``ledger_events`` are not part of the state.
        """
        with self.changed:
            state = self.prompts.state_dict(group.prompt for group in self._groups.values())
            return state | {"ledger_events": self.ledger.count()}
