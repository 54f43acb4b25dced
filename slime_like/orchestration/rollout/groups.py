"""Groups: every prompt group from its issue to its training step, one asyncio task per group."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from slime_like.config import RunConfig
from slime_like.data.ledger import DROPPED, FAILED, GENERATED, ISSUED, REISSUED, SCORED, TRAINED, Ledger
from slime_like.data.prompts import Prompt, PromptSource
from slime_like.errors import EngineError
from slime_like.interfaces import GenerationRequest
from slime_like.observability.records import PhaseClock
from slime_like.orchestration.rollout.advantages import weighted_rewards
from slime_like.orchestration.rollout.engines import Engines
from slime_like.orchestration.rollout.issue import PromptQueue, StalenessGate
from slime_like.orchestration.rollout.requests import to_group
from slime_like.orchestration.rollout.roles import RoleQueue
from slime_like.orchestration.rollout.scoring import MASKED, OUTCOME, RESAMPLED, RewardedGroup, Scorer, StepFailures
from slime_like.trajectory import GroupedUnscoredTrajectories, ScoredTrajectory

GENERATE, REWARD, REWARDED, SCORE, READY = "generate", "reward", "rewarded", "score", "ready"

_MAX_RESAMPLES = 2
"""Number of times that a group is sampled again because rollouts failed."""
_LOOK_EVERY_S = 0.2
_TOGETHER_S = 0.002
"""Wait for groups whose samples end with the same token. They are rewarded in one call."""
_END_TIMEOUT_S = 60.0


@dataclass(eq=False, slots=True)
class Group:
    """A group from its issue until a batch takes it.

    Attributes:
        version: earliest weight version that may sample its first token.
        stage: ``GENERATE``, ``REWARD``, ``REWARDED``, ``SCORE`` (by workers of roles), or ``READY``.
        resamples: number of times that it was sampled again because rollouts failed.
        task: its way to ``READY``.
        accepted: whether it is trained; known once it and others of the step are rewarded.
    """

    prompt: Prompt
    request: GenerationRequest
    version: int
    stage: str = GENERATE
    resamples: int = 0
    task: asyncio.Task[None] | None = field(init=False, default=None, repr=False)
    accepted: asyncio.Future[bool] = field(init=False, repr=False)
    rewarded: RewardedGroup = field(init=False, repr=False)


class Groups:
    """Groups under way and ready for training. The ledger records every change.

    A group's task is in the engines' event loop: it is sampled, rewarded, and scored by the workers of roles. The
    training loop takes ready groups, raises the tasks' errors, and replaces engines. With ``rollout.max_staleness`` 0,
    groups are only issued while it waits for a batch, and then trained or dropped together. So the replacement of
    dropped groups does not depend on which was faster. With ``rollout.oversample`` above 1, a complete batch aborts all
    other groups.

    Args:
        roles: score groups, one after the other, before they are ready for training.

    Attributes:
        changed: guards the state; notified when it has changed.
        gate: served version and position of the batches.
        failures: failures of the step. ``failure`` is what ended the tasks.
    """

    def __init__(
        self,
        config: RunConfig,
        prompts: PromptSource,
        engines: Engines,
        scorer: Scorer,
        ledger: Ledger,
        roles: Sequence[RoleQueue] = (),
    ) -> None:
        rollout = config.rollout
        rollouts = rollout.prompts_per_step * rollout.samples_per_prompt
        self.config = config
        self.prompts = PromptQueue(config, prompts)
        self.ledger = ledger
        self.roles = roles
        self.gate = StalenessGate(rollout.prompts_per_step, rollout.max_staleness, config.steps, rollout.oversample)
        self.changed = threading.Condition()
        self.failures = StepFailures(rollouts, config.reward.max_failed_fraction, rollout.max_drops_per_step)
        self.failure: BaseException | None = None
        self.engines = engines
        self._scorer = scorer
        self._groups: dict[int, Group] = {}  # by group id, in order of arrival at their stage
        self._arrived: dict[Group, GroupedUnscoredTrajectories] = {}  # samples of the next call of the scorer
        self._call: asyncio.Future[list[RewardedGroup]]
        self._asked = config.steps if rollout.max_staleness else 0  # last step whose groups may be issued

    # ------------------------------------------------------------------------------------------------- training loop
    def serve(self, version: int) -> None:
        """Record that the engines serve ``version``."""
        with self.changed:
            self.gate.serve(version)
            self._issue()

    def next_batch(self, step: int, clock: PhaseClock) -> list[ScoredTrajectory]:
        """Return the groups of training step ``step``, in id order.

        Raises:
            EngineError, RewardError: an engine or reward worker failed.
        """
        groups = [group for part in self._take(step, self.config.rollout.prompts_per_step, clock) for group in part]
        with clock.phase("reward"):
            return self._scorer.scored(groups, step)

    def stream(self, step: int, clock: PhaseClock) -> Iterator[list[ScoredTrajectory]]:
        """Yield the groups of training step ``step`` as they become ready, a few at a time. Raises like ``next_batch``.

        After a while, it yields an empty list: groups that the caller holds back may be due.
        """
        for groups in self._take(step, 1, clock):
            with clock.phase("reward"):
                trajectories = self._scorer.scored(groups, step) if groups else []
            yield trajectories

    def is_complete(self, step: int) -> bool:
        """Return whether all groups of training step ``step`` have been returned."""
        return self.gate.formed >= step

    def trained(self, trajectories: Sequence[ScoredTrajectory], step: int) -> None:
        """Record that every update of the step has been made."""
        self.ledger.add(dict.fromkeys(trajectory.group_id for trajectory in trajectories), TRAINED, step=step)

    def _take(self, step: int, at_least: int, clock: PhaseClock) -> Iterator[list[RewardedGroup]]:
        """Yield groups of ``step`` as they become ready, at least ``at_least`` at a time, or none after a while."""
        with clock.phase("wait"), self.changed:
            self._asked = max(self._asked, step)
            self._issue()
        while self.gate.formed < step:
            with clock.phase(self._phase()):
                groups = self._ready_groups(at_least)
            yield groups
        if self.config.rollout.oversample > 1:
            try:
                self.engines.thread.run(self._abort(), _END_TIMEOUT_S)
            except TimeoutError as error:
                raise EngineError(
                    f"canceled groups did not end within {_END_TIMEOUT_S:g} s",
                    code="abort-timeout",
                    who="rollout",
                    phase=f"ending what step {step} does not train (rollout.oversample)",
                    remedy="look into the engines' logs in worker_logs, or set rollout.oversample to 1",
                ) from error

    def _phase(self) -> str:
        """Return what the training loop waits for."""
        if self.config.rollout.max_staleness:
            return "wait"
        return "generate" if self.at(GENERATE) else "reward"

    def _ready_groups(self, at_least: int) -> list[RewardedGroup]:
        """Return all groups that the batch may take, in id order, or none if there are fewer than ``at_least``."""
        phase = self._phase()
        with self.changed:
            self.changed.wait_for(
                lambda: self.failure or self._may_take(at_least) or self._phase() != phase, _LOOK_EVERY_S
            )
            if self.failure is not None:
                raise self.failure
            if count := self._may_take(at_least):
                oldest_first = sorted(self.at(READY), key=lambda group: group.version)
                formed = self.gate.formed
                self.gate.take(count)
                if self.gate.formed > formed:
                    self.failures.form()
                taken = sorted(group.prompt.group_id for group in oldest_first[:count])
                return [self._groups.pop(group_id).rewarded for group_id in taken]
        self.engines.check()
        return []

    def _may_take(self, at_least: int) -> int:
        """Return the number of ready groups that the batch may take now, or 0 if there are fewer than ``at_least``."""
        ready = [group.version for group in self.at(READY)]
        if len(ready) < at_least:
            return 0
        under_way = [group.version for group in self._groups.values() if group.stage != READY]
        count = self.gate.may_take(ready, under_way)
        return count if count >= at_least else 0

    async def _abort(self) -> None:
        """Abort and drop all groups, wherever they are."""
        await self._end_tasks()
        with self.changed:
            self.ledger.add(sorted(self._groups), DROPPED, reason="oversampled")
            self._groups.clear()

    async def _end_tasks(self) -> None:
        self._arrived = {}
        tasks = [group.task for group in self._groups.values() if group.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def close(self) -> None:
        """End sampling, within a bound. Groups under way stay so in the ledger."""
        self._asked = 0
        with suppress(TimeoutError):
            self.engines.thread.run(self._end_tasks(), _END_TIMEOUT_S)

    # ------------------------------------------------------------------------------------------------------- position
    @property
    def _takes_all(self) -> bool:
        """Whether a batch waits until all of its groups are rewarded, and takes them together."""
        return not (self.config.rollout.max_staleness or self.config.rollout.stream or self.roles)

    def at(self, stage: str) -> list[Group]:
        """Return the groups at a stage, in order of arrival."""
        with self.changed:
            return [group for group in self._groups.values() if group.stage == stage]

    def sizes(self) -> tuple[int, int]:
        """Return (groups under way, groups ready)."""
        with self.changed:
            ready = len(self.at(READY))
            return len(self._groups) - ready, ready

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

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from ``state_dict``. Groups that were under way are issued again before new ones."""
        self.prompts.load_state_dict(state)

    # ----------------------------------------------------------------------------------------------------- event loop
    def _issue(self) -> None:
        """Issue as many prompts as the staleness bound allows. Called under ``changed``, in any thread."""
        if self.gate.formed >= self._asked:
            return
        version = self.gate.version
        prompts, restored = self.prompts.take(self.gate.may_issue(len(self._groups)))
        groups = [Group(prompt, request, version) for prompt, request in prompts]
        ids = [group.prompt.group_id for group in groups]
        self.ledger.add(ids[restored:], ISSUED, version=version)
        self.ledger.add(ids[:restored], REISSUED, version=version, reason="resumed")
        self._groups |= dict(zip(ids, groups, strict=True))
        self.engines.thread.call_soon(partial(self._begin, groups))  # together: engines get them as a batch

    def _begin(self, groups: Sequence[Group]) -> None:
        for group in groups:
            group.task = asyncio.create_task(self._run(group))

    async def _run(self, group: Group) -> None:
        try:
            await self._prepare(group)
        except Exception as error:  # raised again in the training loop
            with self.changed:
                self.failure = self.failure or error
                self.changed.notify_all()

    async def _prepare(self, group: Group) -> None:
        """Make the group ready, or drop it."""
        request, lost = group.request, partial(self._reissue, group, "engine died")
        while True:
            answers = await self.engines.generate(request, lost)
            samples = to_group(group.prompt, answers, request.sampling.temperature, request.greedy)
            if self._is_final(group, await self._reward(group, samples)):
                break
        group.accepted = asyncio.get_running_loop().create_future()
        self._move([group], REWARDED)
        self._accept()
        if not await group.accepted or not self.roles:
            return
        for role in self.roles:
            if role.source in (None, group.prompt.source):
                group.rewarded = await role.score(group.rewarded)
        self._move([group], READY, SCORED)

    async def _reward(self, group: Group, samples: GroupedUnscoredTrajectories) -> RewardedGroup:
        """Reward the samples. If the batch waits for all groups, those that arrive at the same moment share a call."""
        if not self._takes_all:
            self._move([group], REWARD, GENERATED, version=self.gate.version)
            return (await asyncio.to_thread(self._scorer.rewards, [samples]))[0]
        place, self._arrived[group] = len(self._arrived), samples
        if place == 0:
            self._call = asyncio.ensure_future(self._reward_arrived(self._arrived))
        return (await asyncio.shield(self._call))[place]

    async def _reward_arrived(self, arrived: dict[Group, GroupedUnscoredTrajectories]) -> list[RewardedGroup]:
        await asyncio.sleep(_TOGETHER_S)
        if self._arrived is not arrived:
            return []  # aborted
        self._arrived = {}
        self._move(list(arrived), REWARD, GENERATED, version=self.gate.version)
        return await asyncio.to_thread(self._scorer.rewards, list(arrived.values()))

    def _move(self, groups: Sequence[Group], stage: str, event: str | None = None, version: int | None = None) -> None:
        ids = [group.prompt.group_id for group in groups]
        with self.changed:
            if event is not None:
                self.ledger.add(ids, event, version=version)
            sampled = any(group.stage == GENERATE for group in groups)
            for group in groups:
                group.stage = stage
                self._groups[group.prompt.group_id] = self._groups.pop(group.prompt.group_id)
            if stage == READY or (sampled and not self.at(GENERATE)):  # what the training loop may wait for
                self.changed.notify_all()

    def _reissue(self, group: Group, reason: str) -> None:
        self.ledger.add([group.prompt.group_id], REISSUED, version=self.gate.version, reason=reason)

    def _is_final(self, group: Group, rewarded: RewardedGroup) -> bool:
        """Give a group its rewards, or have it sampled again: with the same request, so that a run that was disturbed
        trains what it would have trained."""
        again = rewarded.resamples and group.resamples < _MAX_RESAMPLES
        for row in rewarded.failed:
            row.reward_metadata[OUTCOME] = RESAMPLED if again else MASKED
        failures = [*(row.reward_metadata for row in rewarded.failed), *rewarded.zeroed]
        with self.changed:
            for each in failures:
                reason = f"{each[OUTCOME]}: {each['reason']}"
                self.ledger.add([group.prompt.group_id], FAILED, reason=reason)
            self.failures.untrained += rewarded.failed
            if again:
                self._move([group], GENERATE)
                group.version, group.resamples = self.gate.version, group.resamples + 1
                self._reissue(group, "failed")
            else:
                group.rewarded = rewarded
                self.failures.rollouts += group.request.num_samples + group.request.greedy
                self.failures.failures += failures
        return not again

    def _accept(self) -> None:
        """Decide which rewarded groups are trained, and issue others in place of the rest.

        If the batch waits for all groups, this waits until enough of them are rewarded.
        """
        with self.changed:
            rewarded = self.at(REWARDED)
            if self._takes_all and len(rewarded) < self.gate.room - len(self.at(READY)):
                return
            self.failures.check()
            reasons = {group: self._reason_to_drop(group.rewarded) for group in rewarded}
            scored = [group.prompt.group_id for group, reason in reasons.items() if reason or not self.roles]
            self.ledger.add(scored, SCORED)
            for group, reason in reasons.items():
                if reason is not None:
                    self.ledger.add([group.prompt.group_id], DROPPED, reason=reason)
                    del self._groups[group.prompt.group_id]
                    self.failures.drop(reason)
                group.accepted.set_result(reason is None)
                group.stage = SCORE if self.roles else READY
            self._issue()
            self.changed.notify_all()

    def _reason_to_drop(self, rewarded: RewardedGroup) -> str | None:
        """Return why the group has no training signal, if so."""
        if not rewarded.group.trajectories:
            return "failures"
        rewards = weighted_rewards(self.config.reward, rewarded.rewards)  # differing lengths don't make a group useful
        is_flat = float(rewards.max() - rewards.min()) <= self.config.algorithm.least_spread
        return "zero spread" if self.config.rollout.drop_zero_spread and is_flat else None
