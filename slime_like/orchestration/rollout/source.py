"""RolloutSource: the batches of a run, sampled inside the training loop or in a thread next to it."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import partial

from slime_like.config import RolloutConfig, RunConfig
from slime_like.data.ledger import TRAINED, Ledger
from slime_like.data.prompts import PromptSource
from slime_like.observability.records import PhaseClock
from slime_like.orchestration.rollout.advantages import configured_estimator, weighted_rewards
from slime_like.orchestration.rollout.colocation import Turns
from slime_like.orchestration.rollout.engine_client import EngineClient
from slime_like.orchestration.rollout.group_store import GENERATE, REWARD, GroupStore, GroupTask
from slime_like.orchestration.rollout.requests import build_requests, to_group, training_sampling
from slime_like.orchestration.rollout.role_pool import RolePool
from slime_like.orchestration.rollout.scoring import RewardedGroup, Scorer
from slime_like.orchestration.rollout.supervisor import EngineSupervisor, NoEngineLeft
from slime_like.system.interrupts import raise_if_interrupted
from slime_like.trajectory import ScoredTrajectory

_POLL_S = 5.0
_SHORT_POLL_S = 0.2
_JOIN_TIMEOUT_S = 60.0


class RolloutSource(ABC):
    """Source of each training step's trajectories. It keeps the position of the run.

    Args:
        supervisor: restarts engines when none is left.
        pools: score groups, one pool after the other, before they are ready for training.

    Attributes:
        store: groups under way or ready, and the position of the prompts.
        turns: turns on devices that trainers and engines may share.
    """

    def __init__(
        self,
        config: RunConfig,
        prompts: PromptSource,
        client: EngineClient,
        scorer: Scorer,
        turns: Turns,
        ledger: Ledger,
        supervisor: EngineSupervisor,
        pools: Sequence[RolePool] = (),
    ) -> None:
        rollout, sampling = config.rollout, training_sampling(config.rollout, config.model)
        requests = partial(
            build_requests,
            sampling=sampling,
            num_samples=rollout.samples_per_prompt,
            seed=config.seed,
            label="train",
            greedy="greedy" in configured_estimator(config.algorithm.advantage.name).needs,
        )
        self.store = GroupStore(rollout, config.steps, config.reward.max_failed_fraction, prompts, ledger, requests)
        self.config = config
        self._client = client
        self._scorer = scorer
        self.turns = turns
        self._supervisor = supervisor
        self.pools = pools

    def synced(self, version: int) -> None:
        """Record that the engines serve ``version``. The first call starts the sampling thread, if there is one."""
        self.store.serve(version)

    def next_batch(self, step: int, clock: PhaseClock) -> list[ScoredTrajectory]:
        """Return the groups of training step ``step``, in id order.

        Raises:
            EngineError, RewardError: an engine or reward worker failed, also in the thread.
        """
        groups = [group for part in self._groups(step, self.config.rollout.prompts_per_step, clock) for group in part]
        with clock.phase("reward"):
            return self._scorer.scored(groups, step)

    def stream(self, step: int, clock: PhaseClock) -> Iterator[list[ScoredTrajectory]]:
        """Yield the groups of training step ``step`` as they become ready, a few at a time. Raises like ``next_batch``.

        After a while, it yields an empty list: groups that the caller holds back may be due.
        """
        for groups in self._groups(step, 1, clock):
            with clock.phase("reward"):
                trajectories = self._scorer.scored(groups, step) if groups else []
            yield trajectories

    def is_complete(self, step: int) -> bool:
        """Return whether all groups of training step ``step`` have been returned."""
        return self.store.gate.formed >= step

    def trained(self, trajectories: Sequence[ScoredTrajectory], step: int) -> None:
        """Record that every update of the step has been made."""
        self.store.ledger.add(dict.fromkeys(trajectory.group_id for trajectory in trajectories), TRAINED, step=step)

    def close(self) -> None:  # noqa: B027
        """End sampling, within a bound. Groups under way stay so in the ledger."""

    @abstractmethod
    def _groups(self, step: int, at_least: int, clock: PhaseClock) -> Iterator[list[RewardedGroup]]:
        """Yield groups of ``step`` as they become ready, at least ``at_least`` at a time, or none after a while."""

    # ------------------------------------------------------------------------------------- stages, called by one thread
    def _poll(self, timeout_s: float) -> list[GroupTask]:
        """Return the next groups with samples, or nothing after ``timeout_s``. Raises like ``EngineClient.poll``; after
        ``NoEngineLeft``, a later call continues."""
        answers, lost = self._client.poll(self.store.at(GENERATE), timeout_s)
        self.store.resent(lost)
        for task, generations in answers:
            request = task.request
            task.samples = to_group(task.prompt, generations, request.sampling.temperature, request.greedy)
        sampled = [task for task, _ in answers]
        self.store.generated(sampled)
        return sampled

    def _reward(self, tasks: Sequence[GroupTask]) -> None:
        for task, rewarded in zip(tasks, self._scorer.rewards([task.samples for task in tasks]), strict=True):
            self.store.rewarded(task, rewarded)

    def _accept(self, idle_s: float) -> None:
        """Pass on all rewarded groups: to the workers of roles, if there are any, then to training. Groups without a
        training signal are dropped. Raises ``RewardError`` if too many rollouts have failed.

        Args:
            idle_s: longest wait for the workers if nothing is at the engines.
        """
        self.store.check_failures()
        rewarded = self.store.at(REWARD)
        whole = [task for task in rewarded if task.rewarded.group.trajectories]
        ready = [task for task in whole if self._is_useful(task.rewarded)]
        self.store.drop([task for task in rewarded if task not in whole], "failures")
        self.store.drop([task for task in whole if task not in ready], "zero spread")
        for pool in self.pools:
            own = [task for task in ready if pool.source in (None, task.prompt.source)]
            self.store.move(own, pool.role)
            scored = pool.poll(self.store.at(pool.role), 0.0 if self.store.at(GENERATE) else idle_s)
            ready = [task for task in ready if task not in own] + scored
        self.store.add_ready(ready)

    def _is_useful(self, rewarded: RewardedGroup) -> bool:
        """Return whether the group's rewards differ, if ``rollout.drop_zero_spread`` requires it."""
        rewards = weighted_rewards(self.config.reward, rewarded.rewards)  # differing lengths don't make a group useful
        spread = float(rewards.max() - rewards.min())
        return not self.config.rollout.drop_zero_spread or spread > self.config.algorithm.least_spread

    def _abort(self) -> None:
        """Abort and drop all groups, wherever they are."""
        self._client.abort(self.store.at(GENERATE))
        self.store.drop_oversampled()


class SynchronousSource(RolloutSource):
    """Source that samples while the training loop waits (``rollout.max_staleness`` 0).

    With ``rollout.oversample`` above 1, a complete batch aborts all other groups.
    """

    def _groups(self, step: int, at_least: int, clock: PhaseClock) -> Iterator[list[RewardedGroup]]:
        with clock.phase("sync"):
            self.turns.generation()
        while self.store.gate.formed < step:
            with clock.phase("wait"):
                self.store.issue()
            self._advance(at_least, clock)
            groups = self.store.take(at_least)
            if groups and self.config.rollout.oversample > 1 and self.store.gate.formed == step:
                self._abort()
            yield groups

    def _advance(self, at_least: int, clock: PhaseClock) -> None:
        """Collect and reward until ``at_least`` groups are ready or dropped. For one group, or with workers of roles,
        collect once.

        Groups are rewarded while others are sampled, but accepted together. So the replacement of dropped groups does
        not depend on which was faster.
        """
        self._collect(clock)
        if not self.pools and at_least > 1:
            missing = at_least - self.store.sizes()[1]
            while len(self.store.at(REWARD)) < missing:
                self._collect(clock)
        with clock.phase("reward"):
            self._accept(_POLL_S)

    def _collect(self, clock: PhaseClock) -> None:
        """Reward the next samples, or none after a while. The wait is short if workers or streamed trainers may
        finish first."""
        raise_if_interrupted()
        with clock.phase("generate"):
            others = self.config.rollout.stream or any(self.store.at(pool.role) for pool in self.pools)
            try:
                sampled = self._poll(_SHORT_POLL_S if others else _POLL_S)
            except NoEngineLeft:
                self._supervisor.revive()
                return
        with clock.phase("reward"):
            self._reward(sampled)


class ThreadedSource(RolloutSource):
    """Source that samples in a thread, as far ahead as ``StalenessGate`` allows (``rollout.max_staleness`` above 0).

    The thread shares the store with the training loop. The loop raises the thread's errors and replaces engines.
    """

    # Shared by both threads.
    _failure: BaseException | None = None
    _stopping = False
    _thread: threading.Thread | None = None

    # --------------------------------------------------------------------------------------------------- training loop
    def synced(self, version: int) -> None:
        super().synced(version)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)
            self._thread.start()

    def _groups(self, step: int, at_least: int, clock: PhaseClock) -> Iterator[list[RewardedGroup]]:
        while self.store.gate.formed < step:
            with clock.phase("wait"):
                groups = self._take(at_least)
            yield groups

    def close(self) -> None:
        self._stopping = True
        if self._thread is not None:
            self._thread.join(_JOIN_TIMEOUT_S)

    def _take(self, at_least: int) -> list[RewardedGroup]:
        store = self.store
        with store.changed:
            store.changed.wait_for(lambda: self._failure or store.may_take() >= at_least, _SHORT_POLL_S)
            if self._failure is not None:
                raise self._failure
            groups = store.take(at_least)
        if not groups:
            raise_if_interrupted()
            self._supervisor.revive()
        return groups

    # --------------------------------------------------------------------------------------------------------- thread
    def _run(self) -> None:
        """Run the thread. All its waits are short, so ``close`` takes effect."""
        try:
            while not self._stopping:
                self.store.issue()
                self._reward(self._collect())
                self._accept(_SHORT_POLL_S)
        except BaseException as error:  # raised again in the training loop
            with self.store.changed:
                self._failure = error
                self.store.changed.notify_all()

    def _collect(self) -> list[GroupTask]:
        """Return the next groups with samples, or nothing after a while: at the staleness limit, or while no engine is
        left."""
        try:
            sampled = self._poll(_SHORT_POLL_S)
            is_idle = not self.store.sizes()[0]
        except NoEngineLeft:
            sampled, is_idle = [], True
        if is_idle:
            with self.store.changed:
                self.store.changed.wait(_SHORT_POLL_S)
        return sampled


def source_class(rollout: RolloutConfig) -> type[RolloutSource]:
    return ThreadedSource if rollout.max_staleness > 0 else SynchronousSource
