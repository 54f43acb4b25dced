"""Drivers of the pipeline: inside the training loop, or in a thread beside it."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator

from slime_like.observability.phases import PhaseClock
from slime_like.orchestration.rollout.colocation import Turns
from slime_like.orchestration.rollout.engine_client import NoEngineLeft
from slime_like.orchestration.rollout.group_store import GroupStore
from slime_like.orchestration.rollout.pipeline import GroupPipeline
from slime_like.orchestration.rollout.scoring import RewardedGroup
from slime_like.orchestration.rollout.supervisor import EngineSupervisor
from slime_like.system.interrupts import raise_if_interrupted
from slime_like.trajectory import GroupedUnscoredTrajectories

_POLL_S = 5.0
_SHORT_POLL_S = 0.2
_CHECK_EVERY_S = 1.0
_JOIN_TIMEOUT_S = 60.0


class RolloutDriver(ABC):
    """Yields the groups of each training step.

    Args:
        supervisor: has engines serve again when none is left.
    """

    def __init__(self, pipeline: GroupPipeline, store: GroupStore, supervisor: EngineSupervisor) -> None:
        self._pipeline = pipeline
        self._store = store
        self._supervisor = supervisor

    def start(self) -> None:  # noqa: B027
        """Begin sampling: the engines serve weights. Later calls change nothing."""

    @abstractmethod
    def groups(self, step: int, at_least: int, clock: PhaseClock) -> Iterator[list[RewardedGroup]]:
        """The groups of ``step`` as they become ready, at least ``at_least`` at a time.

        Raises:
            EngineError, RewardError: from engines and reward workers.
        """

    def close(self) -> None:  # noqa: B027
        """End sampling, within a bound. Groups under way stay so in the ledger."""


class SynchronousDriver(RolloutDriver):
    """Samples while the training loop waits for its groups (``rollout.max_staleness`` 0).

    Args:
        oversample: groups issued per group trained; above 1, a complete batch aborts all others.
    """

    def __init__(
        self,
        pipeline: GroupPipeline,
        store: GroupStore,
        supervisor: EngineSupervisor,
        turns: Turns,
        oversample: float,
    ) -> None:
        super().__init__(pipeline, store, supervisor)
        self._turns = turns
        self._aborts = oversample > 1

    def groups(self, step: int, at_least: int, clock: PhaseClock) -> Iterator[list[RewardedGroup]]:
        with clock.phase("sync"):
            self._turns.generation()
        while self._store.formed < step:
            with clock.phase("wait"):
                self._pipeline.issue()
            self._advance(at_least, clock)
            if groups := self._store.take(at_least):
                if self._aborts and self._store.formed == step:
                    self._pipeline.abort()
                yield groups

    def _advance(self, at_least: int, clock: PhaseClock) -> None:
        """Collect and reward until ``at_least`` groups are ready or dropped; with reference workers, collect once.

        Groups are rewarded while others are still being sampled, and accepted together: when dropped ones are replaced
        does not depend on which was faster.
        """
        rewarded = self._collect_rewarded(clock)
        if not self._pipeline.has_references:
            missing = at_least - self._store.sizes()[1]
            while len(rewarded) < missing:
                rewarded += self._collect_rewarded(clock)
        with clock.phase("reward"):
            self._pipeline.accept(rewarded, 0.0 if self._pipeline.num_sampling else _POLL_S)

    def _collect_rewarded(self, clock: PhaseClock) -> list[RewardedGroup]:
        with clock.phase("generate"):
            groups = self._collect()
        with clock.phase("reward"):
            return self._pipeline.reward(groups)

    def _collect(self) -> list[GroupedUnscoredTrajectories]:
        """The next samples; nothing after a while, which is short when reference workers may finish meanwhile."""
        raise_if_interrupted()
        try:
            return self._pipeline.collect(_SHORT_POLL_S if self._pipeline.num_referred else _POLL_S)
        except NoEngineLeft:
            self._supervisor.revive()
            return []


class ThreadedDriver(RolloutDriver):
    """Samples in a thread, as far ahead of training as ``rollout.max_staleness`` allows.

    The thread shares the store with the training loop. Errors of the thread are raised in the loop, and the loop
    has the engines replaced.
    """

    def __init__(self, pipeline: GroupPipeline, store: GroupStore, supervisor: EngineSupervisor) -> None:
        super().__init__(pipeline, store, supervisor)
        # Below: shared by both threads, under ``store.changed``.
        self._needs_engines = False
        self._failure: BaseException | None = None
        self._stopping = False
        self._thread: threading.Thread | None = None

    # --------------------------------------------------------------------------------------------------- training loop
    def start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)
            self._thread.start()

    def groups(self, step: int, at_least: int, clock: PhaseClock) -> Iterator[list[RewardedGroup]]:
        while self._store.formed < step:
            with clock.phase("wait"):
                groups = self._take(at_least)
            yield groups

    def close(self) -> None:
        with self._store.changed:
            self._stopping = True
            self._store.changed.notify_all()
        if self._thread is not None:
            self._thread.join(_JOIN_TIMEOUT_S)

    def _take(self, at_least: int) -> list[RewardedGroup]:
        while True:
            with self._store.changed:
                self._store.changed.wait_for(lambda: self._has_news(at_least), _CHECK_EVERY_S)
                if self._failure is not None:
                    raise self._failure
                if groups := self._store.take(at_least):
                    return groups
                needs_engines = self._needs_engines
            raise_if_interrupted()
            if needs_engines:
                self._supervisor.revive()
                with self._store.changed:
                    self._needs_engines = False
                    self._store.changed.notify_all()

    def _has_news(self, at_least: int) -> bool:
        return self._failure is not None or self._needs_engines or self._store.may_take() >= at_least

    # --------------------------------------------------------------------------------------------------------- thread
    def _run(self) -> None:
        """Body of the thread. Every wait in it is short, so that ``close`` takes effect."""
        try:
            while not self._stopping:
                self._pipeline.issue()
                rewarded = self._pipeline.reward(self._collect())
                self._pipeline.accept(rewarded, 0.0 if self._pipeline.num_sampling else _SHORT_POLL_S)
        except BaseException as error:  # raised again where the training loop takes its groups
            with self._store.changed:
                self._failure = error
                self._store.changed.notify_all()

    def _collect(self) -> list[GroupedUnscoredTrajectories]:
        try:
            groups = self._pipeline.collect(_SHORT_POLL_S)
        except NoEngineLeft:
            self._wait_for_engines()
            return []
        if not groups and not self._pipeline.num_sampling and not self._pipeline.num_referred:
            with self._store.changed:  # as far ahead as is allowed: until the next version
                self._store.changed.wait(_SHORT_POLL_S)
        return groups

    def _wait_for_engines(self) -> None:
        with self._store.changed:
            self._needs_engines = True
            self._store.changed.notify_all()
            self._store.changed.wait_for(lambda: not self._needs_engines or self._stopping, _CHECK_EVERY_S)
