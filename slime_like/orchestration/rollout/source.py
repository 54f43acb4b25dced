"""RolloutSource: the batches of a run, sampled inside the training loop or in a thread next to it."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from slime_like.config import RolloutConfig, RunConfig
from slime_like.data.ledger import Ledger
from slime_like.data.prompts import Prompt, PromptSource
from slime_like.observability.phases import PhaseClock
from slime_like.orchestration.rollout.advantages import weighted_rewards
from slime_like.orchestration.rollout.colocation import Turns
from slime_like.orchestration.rollout.engine_client import EngineClient
from slime_like.orchestration.rollout.group_store import GroupStore
from slime_like.orchestration.rollout.requests import build_requests, to_group, training_sampling
from slime_like.orchestration.rollout.role_pool import RolePool
from slime_like.orchestration.rollout.scoring import RewardedGroup, Scorer
from slime_like.orchestration.rollout.supervisor import EngineSupervisor, NoEngineLeft
from slime_like.system.interrupts import raise_if_interrupted
from slime_like.trajectory import GroupedUnscoredTrajectories, ScoredTrajectory

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
    """

    def __init__(
        self,
        config: RunConfig,
        prompts: PromptSource,
        client: EngineClient[Prompt],
        scorer: Scorer,
        turns: Turns,
        ledger: Ledger,
        supervisor: EngineSupervisor,
        pools: Sequence[RolePool] = (),
    ) -> None:
        self.store = GroupStore(config.rollout, config.steps, prompts, ledger)
        self._config = config
        self._sampling = training_sampling(config.rollout, config.model)
        self._client = client
        self._scorer = scorer
        self._turns = turns
        self._ledger = ledger
        self._supervisor = supervisor
        self._pools = pools

    def synced(self, version: int) -> None:
        """Record that the engines serve ``version``. The first call starts the sampling thread, if there is one."""
        self.store.serve(version)

    def next_batch(self, step: int, clock: PhaseClock) -> list[ScoredTrajectory]:
        """Return the groups of training step ``step``, in id order.

        Raises:
            EngineError, RewardError: an engine or reward worker failed, also in the thread.
        """
        groups = [group for part in self._groups(step, self._config.rollout.prompts_per_step, clock) for group in part]
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
        return self.store.formed >= step

    def trained(self, trajectories: Sequence[ScoredTrajectory], step: int) -> None:
        """Record that every update of the step has been made."""
        self._ledger.trained(dict.fromkeys(trajectory.group_id for trajectory in trajectories), step)

    def close(self) -> None:  # noqa: B027
        """End sampling, within a bound. Groups under way stay so in the ledger."""

    @abstractmethod
    def _groups(self, step: int, at_least: int, clock: PhaseClock) -> Iterator[list[RewardedGroup]]:
        """Yield groups of ``step`` as they become ready, at least ``at_least`` at a time, or none after a while."""

    # ------------------------------------------------------------------------------------- stages, called by one thread
    def _issue(self) -> None:
        """Queue a request for every prompt that the store issues."""
        prompts, config = self.store.issue(), self._config
        requests = build_requests(prompts, self._sampling, config.rollout.samples_per_prompt, config.seed, "train")
        for prompt, request in zip(prompts, requests, strict=True):
            self._client.submit(prompt, request)

    def _poll(self, timeout_s: float) -> list[GroupedUnscoredTrajectories]:
        """Return the next samples from the engines, or nothing after ``timeout_s``. Raises like ``EngineClient.poll``;
        after ``NoEngineLeft``, a later call continues."""
        answers = self._client.poll(timeout_s)
        self._record_resent()
        temperature = self._sampling.temperature
        groups = [to_group(prompt, generations, temperature) for prompt, generations in answers]
        self.store.generated([group.group_id for group in groups])
        return groups

    def _accept(self, rewarded: Sequence[RewardedGroup], idle_s: float) -> None:
        """Pass groups that are ready for training to the store; with role workers, groups that they have scored.

        Args:
            rewarded: new groups; groups without a training signal are dropped.
            idle_s: longest wait for the workers if nothing is at the engines.
        """
        ready = [group for group in rewarded if self._is_useful(group)]
        self.store.drop_without_spread([group.group.group_id for group in rewarded if not self._is_useful(group)])
        for pool in self._pools:
            for group in ready:
                pool.submit(group)
            ready = pool.poll(0.0 if len(self._client) else idle_s)
        self.store.add_ready(ready)

    @property
    def _num_at_workers(self) -> int:
        """Number of groups at the workers of roles."""
        return sum(map(len, self._pools))

    def _is_useful(self, rewarded: RewardedGroup) -> bool:
        """Return whether the group's rewards differ, if ``rollout.drop_zero_spread`` requires it."""
        rewards = weighted_rewards(self._config.reward, rewarded.rewards)  # differing lengths don't make a group useful
        spread = float(rewards.max() - rewards.min())
        return not self._config.rollout.drop_zero_spread or spread > self._config.algorithm.advantage_eps

    def _abort(self) -> None:
        """Abort and drop all groups, wherever they are."""
        self._record_resent()  # an engine may have died since the last answer
        self._client.abort()
        for pool in self._pools:
            pool.discard()
        self.store.drop_oversampled()

    def _record_resent(self) -> None:
        self.store.resent([prompt.group_id for prompt in self._client.resent])
        self._client.resent.clear()


class SynchronousSource(RolloutSource):
    """Source that samples while the training loop waits (``rollout.max_staleness`` 0).

    With ``rollout.oversample`` above 1, a complete batch aborts all other groups.
    """

    def _groups(self, step: int, at_least: int, clock: PhaseClock) -> Iterator[list[RewardedGroup]]:
        with clock.phase("sync"):
            self._turns.generation()
        while self.store.formed < step:
            with clock.phase("wait"):
                self._issue()
            self._advance(at_least, clock)
            groups = self.store.take(at_least)
            if groups and self._config.rollout.oversample > 1 and self.store.formed == step:
                self._abort()
            yield groups

    def _advance(self, at_least: int, clock: PhaseClock) -> None:
        """Collect and reward until ``at_least`` groups are ready or dropped. For one group, or with workers of roles,
        collect once.

        Groups are rewarded while others are sampled, but accepted together. So the replacement of dropped groups does
        not depend on which was faster.
        """
        rewarded = self._collect_rewarded(clock)
        if not self._pools and at_least > 1:
            missing = at_least - self.store.sizes()[1]
            while len(rewarded) < missing:
                rewarded += self._collect_rewarded(clock)
        with clock.phase("reward"):
            self._accept(rewarded, _POLL_S)

    def _collect_rewarded(self, clock: PhaseClock) -> list[RewardedGroup]:
        """Reward the next samples, or none after a while. The wait is short if workers or streamed trainers may
        finish first."""
        raise_if_interrupted()
        with clock.phase("generate"):
            others = self._config.rollout.stream or self._num_at_workers
            try:
                groups = self._poll(_SHORT_POLL_S if others else _POLL_S)
            except NoEngineLeft:
                self._supervisor.revive()
                return []
        with clock.phase("reward"):
            return self._scorer.rewards(groups)


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
        while self.store.formed < step:
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
                self._issue()
                self._accept(self._scorer.rewards(self._collect()), _SHORT_POLL_S)
        except BaseException as error:  # raised again in the training loop
            with self.store.changed:
                self._failure = error
                self.store.changed.notify_all()

    def _collect(self) -> list[GroupedUnscoredTrajectories]:
        """Return the next samples, or nothing after a while: at the staleness limit, or while no engine is left."""
        try:
            groups = self._poll(_SHORT_POLL_S)
            is_idle = not groups and not len(self._client) and not self._num_at_workers
        except NoEngineLeft:
            groups, is_idle = [], True
        if is_idle:
            with self.store.changed:
                self.store.changed.wait(_SHORT_POLL_S)
        return groups


def source_class(rollout: RolloutConfig) -> type[RolloutSource]:
    """Return the class of the run's source."""
    return ThreadedSource if rollout.max_staleness > 0 else SynchronousSource
