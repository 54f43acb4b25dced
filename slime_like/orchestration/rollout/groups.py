"""Groups: every prompt group from its issue to its training step, one asyncio task per group."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from slime_like.config import RunConfig
from slime_like.data.ledger import GENERATED, SCORED, TRAINED, Ledger
from slime_like.data.prompts import PromptSource
from slime_like.errors import EngineError
from slime_like.observability.timing import PhaseClock
from slime_like.orchestration.rollout.engines import Engines
from slime_like.orchestration.rollout.group_table import READY, REWARD, Group, GroupTable
from slime_like.orchestration.rollout.requests import to_group
from slime_like.orchestration.rollout.scoring import RewardedGroup, Scorer
from slime_like.trajectory import GroupedUnscoredTrajectories, ScoredTrajectory

if TYPE_CHECKING:
    from slime_like.orchestration.rollout.roles import RoleQueue

_TOGETHER_S = 0.002
"""Wait for groups whose samples end with the same token. They are rewarded in one call."""
_END_TIMEOUT_S = 60.0


class Groups:
    """Groups under way and ready for training.

    A group's task is in the engines' event loop: it is sampled, rewarded, and scored by the workers of roles. The
    training loop takes ready groups, raises the tasks' errors, and replaces engines. With ``rollout.max_staleness`` 0,
    groups are only issued while it waits for a batch, and then trained or dropped together. So the replacement of
    dropped groups does not depend on which was faster. With ``rollout.oversample`` above 1, a complete batch aborts all
    other groups.

    Args:
        roles: score groups, one after the other, before they are ready for training.

    Attributes:
        table: all groups, and the position of the batches.
        drafts: of every response since it was last cleared, ``Generation.drafts``, if tokens were drafted.
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
        self.table = GroupTable(config, prompts, ledger, self._begin, bool(roles))
        self.config = config
        self.engines = engines
        self.roles = roles
        self.drafts: list[tuple[int, int]] = []
        self._scorer = scorer
        self._arrived: dict[Group, GroupedUnscoredTrajectories] = {}  # samples of the next call of the scorer
        self._call: asyncio.Future[list[RewardedGroup]]

    # ------------------------------------------------------------------------------------------------- training loop
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
        return self.table.gate.formed >= step

    def trained(self, trajectories: Sequence[ScoredTrajectory], step: int) -> None:
        """Record that every update of the step has been made."""
        self.table.ledger.add(dict.fromkeys(trajectory.group_id for trajectory in trajectories), TRAINED, step=step)

    def _take(self, step: int, at_least: int, clock: PhaseClock) -> Iterator[list[RewardedGroup]]:
        """Yield groups of ``step`` as they become ready, at least ``at_least`` at a time, or none after a while."""
        with clock.phase("wait"):
            self.table.ask_for(step)
        while not self.is_complete(step):
            with clock.phase(self.table.phase):
                groups = self.table.take(at_least)
                if not groups:
                    self.engines.check()
            yield groups
        if self.config.rollout.oversample > 1:
            try:
                self.engines.thread.run(self._end_tasks(), _END_TIMEOUT_S)
            except TimeoutError as error:
                raise EngineError(
                    f"canceled groups did not end within {_END_TIMEOUT_S:g} s",
                    code="abort-timeout",
                    who="rollout",
                    phase=f"ending what step {step} does not train (rollout.oversample)",
                    remedy="look into the engines' logs in worker_logs, or set rollout.oversample to 1",
                ) from error
            self.table.drop_all("oversampled")

    def close(self) -> None:
        """End sampling, within a bound. Groups under way stay so in the ledger."""
        self.table.close()
        with suppress(TimeoutError):
            self.engines.thread.run(self._end_tasks(), _END_TIMEOUT_S)

    # ----------------------------------------------------------------------------------------------------- event loop
    def _begin(self, groups: Sequence[Group]) -> None:
        """Start the groups' tasks. Called in any thread."""

        def begin() -> None:
            for group in groups:
                group.task = asyncio.create_task(self._run(group))

        self.engines.thread.call_soon(begin)

    async def _end_tasks(self) -> None:
        self._arrived = {}
        tasks = [group.task for group in self.table.at() if group.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, group: Group) -> None:
        try:
            await self._prepare(group)
        except Exception as error:  # raised again in the training loop
            self.table.fail(error)

    async def _prepare(self, group: Group) -> None:
        """Make the group ready, or drop it."""
        request, lost = group.request, partial(self.table.reissue, group, "engine died")
        group.accepted = asyncio.get_running_loop().create_future()
        while True:
            answers = await self.engines.generate(request, lost)
            self.drafts += [answer.drafts for answer in answers if any(answer.drafts)]
            samples = to_group(group.prompt, answers, request.sampling.temperature, request.greedy)
            if self.table.settle(group, await self._reward(group, samples)):
                break
        self.table.accept()
        if not await group.accepted or not self.roles:
            return
        for role in self.roles:
            if role.source in (None, group.prompt.source):
                group.rewarded = await role.score(group.rewarded)
        self.table.move([group], READY, SCORED)

    async def _reward(self, group: Group, samples: GroupedUnscoredTrajectories) -> RewardedGroup:
        """Reward the samples. If the batch waits for all groups, those that arrive at the same moment share a call."""
        if not self.table.takes_all:
            return (await self._reward_all({group: samples}))[0]
        place, self._arrived[group] = len(self._arrived), samples
        if place == 0:
            self._call = asyncio.ensure_future(self._reward_arrived(self._arrived))
        return (await asyncio.shield(self._call))[place]

    async def _reward_arrived(self, arrived: dict[Group, GroupedUnscoredTrajectories]) -> list[RewardedGroup]:
        await asyncio.sleep(_TOGETHER_S)
        if self._arrived is not arrived:
            return []  # aborted
        self._arrived = {}
        return await self._reward_all(arrived)

    async def _reward_all(self, samples: dict[Group, GroupedUnscoredTrajectories]) -> list[RewardedGroup]:
        self.table.move(list(samples), REWARD, GENERATED, version=self.table.gate.version)
        return await asyncio.to_thread(self._scorer.rewards, list(samples.values()))
