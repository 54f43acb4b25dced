"""Groups of prompts through engines and rewards, as far ahead of training as ``rollout.max_staleness`` allows."""

from __future__ import annotations

import math
import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from slime_like.config import RunConfig
from slime_like.data.ledger import Ledger
from slime_like.data.prompts import Prompt, PromptSource
from slime_like.errors import RewardError, TrainerError
from slime_like.observability.phases import PhaseClock
from slime_like.orchestration.rollout.colocation import Turns
from slime_like.orchestration.rollout.in_flight import Flight, NoEngineLeft
from slime_like.orchestration.rollout.reference_pool import ReferencePool
from slime_like.orchestration.rollout.replay import Held, ReplayBuffer
from slime_like.orchestration.rollout.requests import build_requests, to_group, training_sampling
from slime_like.orchestration.rollout.scoring import RewardedGroup, Scorer
from slime_like.orchestration.rollout.supervisor import EngineSupervisor
from slime_like.system.interrupts import raise_if_interrupted
from slime_like.trajectory import GroupedUnscoredTrajectories, ScoredTrajectory

_POLL_S = 5.0
_THREAD_POLL_S = 0.2
_LOOK_EVERY_S = 1.0
_JOIN_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class _Issued:
    """A prompt on its way, and the weights that its first token may be sampled by at the earliest."""

    prompt: Prompt
    version: int


@dataclass(frozen=True, slots=True)
class _Ready:
    prompt: Prompt
    rewarded: RewardedGroup


class RolloutSource:
    """Issues prompts, collects samples, has them rewarded, and forms the batch of every step.

    Before step n, the engines serve version n - 1. Until version v is served, ``v + max_staleness + 1`` batches may
    have been issued, dropped groups not counted, but no more than the run has steps. So the groups of any one version
    are never more than still fit into the batches that may train on them. A batch takes the oldest that are ready, but
    waits as long as what it would leave behind could not all be trained in time: nothing is thrown away for its age.

    With max_staleness 0 everything happens in ``next_batch`` or ``stream``; above 0 a thread samples and scores all the
    time.

    Args:
        flight: an empty one through the run's engines.
        supervisor: has engines serve again when none is left.
        references: scores groups that will be trained before they count as ready; none where trainers do it.
    """

    def __init__(
        self,
        config: RunConfig,
        prompts: PromptSource,
        flight: Flight,
        scorer: Scorer,
        turns: Turns,
        ledger: Ledger,
        supervisor: EngineSupervisor,
        references: ReferencePool | None = None,
    ) -> None:
        self._config = config
        self._prompts = prompts
        self._flight = flight
        self._scorer = scorer
        self._turns = turns
        self._ledger = ledger
        self._supervisor = supervisor
        self._references = references
        self._sampling = training_sampling(config)
        self._asked: dict[str, Prompt] = {}
        # Below: shared by the main thread and the sampling thread, under the condition.
        self._changed = threading.Condition()
        self._again: deque[Prompt] = deque()
        self._issued: dict[int, _Issued] = {}
        self._buffer: ReplayBuffer[_Ready] = ReplayBuffer(config.rollout.max_staleness)
        self._version = self._formed = 0
        self._taken = 0  # of the batch that is being formed
        self._dropped = 0
        self._no_engine: NoEngineLeft | None = None
        self._failure: BaseException | None = None
        self._stopping = False
        self._thread: threading.Thread | None = None

    # --------------------------------------------------------------------------------------------------- the main loop
    def synced(self, version: int) -> None:
        """The engines serve ``version``; the first call starts the sampling thread, if there is to be one."""
        with self._changed:
            if self._thread is None and not self._issued:
                self._formed = version
            self._version = version
            self._changed.notify_all()
        if self._thread is None and self._config.rollout.max_staleness > 0:
            self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)
            self._thread.start()

    def next_batch(self, step: int, clock: PhaseClock) -> list[ScoredTrajectory]:
        """The groups of training step ``step``, in the order of their ids.

        Raises:
            EngineError, RewardError: from engines and reward workers, also where they happened in the thread.
        """
        groups = self._batch_in_turn(step, clock) if self._thread is None else self._batch_beside(step, clock)
        with clock.phase("reward"):
            return self._scored(groups, step)

    def stream(self, step: int, clock: PhaseClock) -> Iterator[list[ScoredTrajectory]]:
        """The groups of training step ``step`` as they become ready, a few at a time.

        Raises:
            EngineError, RewardError: as ``next_batch``.
        """
        parts = self._parts_in_turn(step, clock) if self._thread is None else self._parts_beside(step, clock)
        for groups in parts:
            with clock.phase("reward"):
                trajectories = self._scored(groups, step)
            yield trajectories

    def _scored(self, groups: Sequence[Held[_Ready]], step: int) -> list[ScoredTrajectory]:
        return self._scorer.scored([held.content.rewarded for held in groups], step)

    def trained(self, trajectories: Sequence[ScoredTrajectory], step: int) -> None:
        """Every update of the step has been made."""
        self._ledger.trained(dict.fromkeys(trajectory.group_id for trajectory in trajectories), step)

    def queue_sizes(self) -> tuple[int, int]:
        """(groups on their way, groups ready to be trained on)."""
        with self._changed:
            return len(self._issued), len(self._buffer)

    def close(self) -> None:
        """End the thread, within a bound. What it had on its way stays so in the ledger."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join(_JOIN_TIMEOUT_S)

    # ------------------------------------------------------------------------------------------------------ the state
    def state_dict(self) -> dict[str, Any]:
        """Position of the prompts, and those that were issued and not trained; expressible in JSON."""
        with self._changed:
            unfinished = [issued.prompt for issued in self._issued.values()]
            unfinished += [held.content.prompt for held in self._buffer]
            unfinished += self._again
            return {
                "data": self._prompts.state_dict(),
                "in_flight": [asdict(prompt) for prompt in sorted(unfinished, key=lambda prompt: prompt.group_id)],
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state_dict``: what was in flight is issued again before anything new."""
        self._prompts.load_state_dict(state["data"])
        self._again = deque(_prompt(fields) for fields in state.get("in_flight", ()))

    # ---------------------------------------------------------------------------------------------------- both manners
    def _issue(self) -> None:
        """Send as many prompts as the bound on staleness allows."""
        rollout = self._config.rollout
        with self._changed:
            batches = min(self._version + rollout.max_staleness + 1, self._config.steps) - self._formed
            allowed = math.ceil(batches * rollout.prompts_per_step * rollout.oversample)
            count = max(0, allowed - len(self._issued) - len(self._buffer) - self._taken)
            again = [self._again.popleft() for _ in range(min(count, len(self._again)))]
            new = self._prompts.next(count - len(again))
            for prompt in (*again, *new):
                self._issued[prompt.group_id] = _Issued(prompt, self._version)
            self._ledger.issued([prompt.group_id for prompt in new], self._version)
            self._ledger.reissued([prompt.group_id for prompt in again], self._version, "resumed")
        prompts = [*again, *new]
        requests = build_requests(prompts, self._sampling, rollout.samples_per_prompt, self._config.seed, "train")
        for prompt, request in zip(prompts, requests, strict=True):
            self._asked[request.request_id] = prompt
            self._flight.submit(request)

    def _collect(self, timeout_s: float) -> list[GroupedUnscoredTrajectories]:
        answers = self._flight.poll(timeout_s)
        self._note_moved()
        groups = [
            to_group(self._asked.pop(request.request_id), generations, self._sampling.temperature)
            for request, generations in answers
        ]
        self._ledger.generated([group.group_id for group in groups], self._version)
        return groups

    def _note_moved(self) -> None:
        """What the flight has sent again."""
        if self._flight.moved:
            moved = [self._asked[name].group_id for name in self._flight.moved]
            self._flight.moved.clear()
            self._ledger.reissued(moved, self._version, "engine died")

    def _score(self, groups: Sequence[GroupedUnscoredTrajectories], timeout_s: float = 0.0) -> None:
        """Have ``groups`` rewarded, and take in what is ready then; see ``_take_in``."""
        self._take_in(self._scorer.rewards(groups) if groups else [], timeout_s)

    def _take_in(self, rewarded: Sequence[RewardedGroup], timeout_s: float = 0.0) -> None:
        """What is ready for training goes to the buffer.

        Args:
            rewarded: new groups; none is taken in that nothing can be learnt from.
            timeout_s: longest wait for the reference's opinion, of these or of earlier ones.
        """
        teaching = [own for own in rewarded if self._teaches(own)]
        self._leave_out([own.group.group_id for own in rewarded if not self._teaches(own)])
        if self._references is not None:
            for own in teaching:
                self._references.submit(own)
            teaching = self._references.poll(timeout_s)
        if not teaching:
            return
        with self._changed:
            self._ledger.scored([own.group.group_id for own in teaching])
            for own in teaching:
                issued = self._issued.pop(own.group.group_id)
                self._buffer.add(own.group.group_id, issued.version, _Ready(issued.prompt, own))
            self._changed.notify_all()

    def _leave_out(self, group_ids: Sequence[int]) -> None:
        """Groups whose samples all have the same reward."""
        if not group_ids:
            return
        with self._changed:
            self._ledger.scored(group_ids)
            for group_id in group_ids:
                del self._issued[group_id]
                self._drop([group_id], "zero spread")
            self._changed.notify_all()

    @property
    def _num_referred(self) -> int:
        """Groups at the reference workers."""
        return len(self._references) if self._references is not None else 0

    def _teaches(self, rewarded: RewardedGroup) -> bool:
        spread = float(rewarded.totals.max() - rewarded.totals.min())
        return not self._config.rollout.drop_zero_spread or spread > self._config.algorithm.advantage_eps

    def _drop(self, group_ids: Sequence[int], reason: str) -> None:
        self._ledger.dropped(group_ids, reason)
        self._dropped += len(group_ids) if reason == "zero spread" else 0
        limit = self._config.rollout.max_drops_per_step
        if self._dropped > limit:
            raise RewardError(
                f"{self._dropped} groups for one step were dropped because all their samples had the same reward, more "
                f"than rollout.max_drops_per_step={limit}; choose prompts that are neither always nor never solved, or "
                "set rollout.drop_zero_spread=false"
            )

    def _available(self, step: int) -> int:
        """How many groups, oldest first, the step may take now: the most that it has room for, as long as what they
        leave behind can still be trained in time."""
        rollout = self._config.rollout
        ready = sorted(held.version for held in self._buffer)
        most = min(rollout.prompts_per_step - self._taken, len(ready))
        if rollout.oversample > 1:
            return most
        on_their_way = [issued.version for issued in self._issued.values()]

        def too_many(count: int) -> bool:
            left = sorted([*ready[count:], *on_their_way])
            places = range(self._taken + count, self._taken + count + len(left))
            steps = (step + place // rollout.prompts_per_step for place in places)
            return any(own > version + rollout.max_staleness + 1 for own, version in zip(steps, left, strict=True))

        # Whoever may take n groups may take n - 1: what stays behind moves to earlier places, if at all.
        return bisect_left(range(1, most + 1), True, key=too_many)

    def _take(self, step: int, count: int) -> list[Held[_Ready]]:
        stale = self._buffer.drop_stale(step - 1)
        if stale:
            raise TrainerError(f"step {step}: groups {stale} are older than rollout.max_staleness allows; report this")
        groups = self._buffer.take(count)
        self._taken += count
        if self._taken == self._config.rollout.prompts_per_step:
            self._formed = step
            self._taken = self._dropped = 0
        return groups

    # ------------------------------------------------------------------------------------------------ sampling in turn
    def _batch_in_turn(self, step: int, clock: PhaseClock) -> list[Held[_Ready]]:
        size = self._config.rollout.prompts_per_step
        with clock.phase("sync"):
            self._turns.generation()
        while self._available(step) < size:
            with clock.phase("wait"):
                self._issue()
            if self._references is None:
                self._collect_enough(clock)
            else:
                with clock.phase("generate"):
                    groups = self._collect_some()
                with clock.phase("reward"):
                    self._score(groups, 0.0 if len(self._flight) else _POLL_S)
        return self._last_of_step(self._take(step, size))

    def _parts_in_turn(self, step: int, clock: PhaseClock) -> Iterator[list[Held[_Ready]]]:
        while self._formed < step:
            with clock.phase("wait"):
                self._issue()
            with clock.phase("generate"):
                groups = self._collect_some()
            with clock.phase("reward"):
                self._score(groups, 0.0 if len(self._flight) else _POLL_S)
            if count := self._available(step):
                part = self._take(step, count)
                yield self._last_of_step(part) if self._formed == step else part

    def _last_of_step(self, groups: list[Held[_Ready]]) -> list[Held[_Ready]]:
        """``groups``; whatever else was oversampled is aborted."""
        if self._config.rollout.oversample > 1:
            self._abort_rest()
        return groups

    def _collect_enough(self, clock: PhaseClock) -> None:
        """Everything that is on its way; of what was oversampled, as much as is missing.

        Groups are rewarded while others are still being sampled, and taken in together: when dropped ones are replaced
        does not depend on who was faster.
        """
        rollout = self._config.rollout
        enough = rollout.prompts_per_step - len(self._buffer) if rollout.oversample > 1 else math.inf
        rewarded: list[RewardedGroup] = []
        while len(self._flight) and len(rewarded) < enough:
            with clock.phase("generate"):
                groups = self._collect_some()
            with clock.phase("reward"):
                rewarded += self._scorer.rewards(groups) if groups else []
        with clock.phase("reward"):
            self._take_in(rewarded)

    def _collect_some(self) -> list[GroupedUnscoredTrajectories]:
        """Whatever comes first; nothing if that takes long, or other groups may be ready meanwhile."""
        raise_if_interrupted()
        try:
            return self._collect(_THREAD_POLL_S if self._num_referred else _POLL_S)
        except NoEngineLeft:
            self._supervisor.revive()
            return []

    def _abort_rest(self) -> None:
        self._note_moved()  # an engine may have died since the last answer
        self._flight.abort(self._asked.keys())
        if self._references is not None:
            self._references.discard()
        self._asked.clear()
        rest = [*self._issued, *(held.group_id for held in self._buffer.take(len(self._buffer)))]
        self._issued.clear()
        self._drop(rest, "oversampled")

    # --------------------------------------------------------------------------------------- sampling beside training
    def _batch_beside(self, step: int, clock: PhaseClock) -> list[Held[_Ready]]:
        with clock.phase("wait"):
            return self._take_beside(step, self._config.rollout.prompts_per_step)

    def _parts_beside(self, step: int, clock: PhaseClock) -> Iterator[list[Held[_Ready]]]:
        while self._formed < step:
            with clock.phase("wait"):
                part = self._take_beside(step, 1)
            yield part

    def _take_beside(self, step: int, fewest: int) -> list[Held[_Ready]]:
        """As many groups as the step may take, as soon as they are ``fewest``."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._has_news(step, fewest), _LOOK_EVERY_S)
                if self._failure is not None:
                    raise self._failure
                count = self._available(step)
                if count >= fewest:
                    return self._take(step, count)
                lost = self._no_engine is not None
            raise_if_interrupted()
            if lost:
                self._supervisor.revive()
                with self._changed:
                    self._no_engine = None
                    self._changed.notify_all()

    def _has_news(self, step: int, fewest: int) -> bool:
        return self._failure is not None or self._no_engine is not None or self._available(step) >= fewest

    def _run(self) -> None:
        """The thread. Every wait in it is short, so that ``close`` is heard."""
        try:
            while not self._stopping:
                self._issue()
                self._score(self._collect_or_wait(), 0.0 if len(self._flight) else _THREAD_POLL_S)
        except BaseException as error:  # raised again where the main thread asks for its batch
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _collect_or_wait(self) -> list[GroupedUnscoredTrajectories]:
        try:
            groups = self._collect(_THREAD_POLL_S)
        except NoEngineLeft as error:
            with self._changed:
                self._no_engine = error
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._no_engine is None or self._stopping, _LOOK_EVERY_S)
            return []
        if not groups and not len(self._flight) and not self._num_referred:
            # As far ahead as is allowed: until the next version.
            with self._changed:
                self._changed.wait(_THREAD_POLL_S)
        return groups


def _prompt(fields: dict[str, Any]) -> Prompt:
    """What JSON made of a prompt without a demonstration."""
    return Prompt(**{**fields, "tokens": tuple(fields["tokens"])})
