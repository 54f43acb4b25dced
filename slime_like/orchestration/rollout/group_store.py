"""GroupStore: every prompt group from its issue to its training step."""

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from slime_like.config.rollout import RolloutConfig
from slime_like.data.ledger import DROPPED, FAILED, GENERATED, ISSUED, REISSUED, SCORED, Ledger
from slime_like.data.prompts import Prompt, PromptSource
from slime_like.errors import RewardError
from slime_like.interfaces import GenerationRequest, PromptInput
from slime_like.orchestration.rollout.engine_client import EngineCall
from slime_like.orchestration.rollout.scoring import MASKED, OUTCOME, RESAMPLED, RewardedGroup, failure_text
from slime_like.orchestration.rollout.staleness import StalenessGate
from slime_like.system.words import counted
from slime_like.trajectory import GroupedUnscoredTrajectories, ScoredTrajectory

GENERATE, REWARD, READY = "generate", "reward", "ready"

_MAX_RESAMPLES = 2
"""Number of times that a group is sampled again because rollouts failed."""


@dataclass(eq=False, slots=True, kw_only=True)
class GroupTask(EngineCall):
    """A group from its issue until a batch takes it.

    Attributes:
        answer: Ray's reference to its samples, its worker, or the pool that has scored it; ``None`` while it waits.
        version: earliest weight version that may sample its first token.
        stage: ``GENERATE``, ``REWARD``, a role whose workers score it, or ``READY``.
        resamples: number of times that it was sampled again because rollouts failed.
        samples, rewarded: results of the stages ``GENERATE`` and ``REWARD``. Workers of roles add scores.
    """

    prompt: Prompt
    version: int
    stage: str = GENERATE
    resamples: int = 0
    samples: GroupedUnscoredTrajectories = field(init=False, repr=False)
    rewarded: RewardedGroup = field(init=False, repr=False)


@dataclass(slots=True)
class FailedRollouts:
    """Failed rollouts of the step whose batch is being formed.

    Attributes:
        step_rollouts: number of rollouts of a step.
        max_fraction: ``reward.max_failed_fraction``.
        untrained: failed rollouts that are not trained, by their last row, since they were last taken.
        rollouts, failures: all rollouts since a batch was last formed, without those to be sampled again, and metadata
            of those that failed.
    """

    step_rollouts: int
    max_fraction: float
    untrained: list[ScoredTrajectory] = field(default_factory=list)
    rollouts: int = 0
    failures: list[Mapping[str, Any]] = field(default_factory=list)

    def formed(self) -> None:
        """Begin to count for the next step, unless its rollouts are counted along with this one's: sampling ahead."""
        if self.rollouts >= self.step_rollouts:
            self.rollouts, self.failures = 0, []


class GroupStore:
    """Groups to issue again, under way, and ready for training. The ledger records every change. Thread-safe.

    Args:
        steps: number of steps of the run.
        max_failed_fraction: see ``RewardConfig``.
        requests: builds the requests for prompts.

    Attributes:
        changed: guards the state; notified when a batch may take more groups or more may be issued.
        gate: served version and position of the batches.
    """

    def __init__(
        self,
        rollout: RolloutConfig,
        steps: int,
        max_failed_fraction: float,
        prompts: PromptSource,
        ledger: Ledger,
        requests: Callable[[Sequence[Prompt]], list[GenerationRequest]],
    ) -> None:
        self.changed = threading.Condition()
        self.gate = StalenessGate(rollout.prompts_per_step, rollout.max_staleness, steps, rollout.oversample)
        self.prompts = prompts
        self.ledger = ledger
        self._requests = requests
        self._max_drops = rollout.max_drops_per_step
        self._interrupted: deque[Prompt] = deque()
        self._tasks: dict[int, GroupTask] = {}  # by group id, in order of arrival at their stage
        self._dropped = 0
        step_rollouts = rollout.prompts_per_step * rollout.samples_per_prompt
        self._failed = FailedRollouts(step_rollouts, max_failed_fraction)

    # ------------------------------------------------------------------------------------------------------- position
    def serve(self, version: int) -> None:
        with self.changed:
            self.gate.serve(version)
            self.changed.notify_all()

    def at(self, stage: str) -> list[GroupTask]:
        """Return the tasks at a stage, in order of arrival."""
        with self.changed:
            return [task for task in self._tasks.values() if task.stage == stage]

    def sizes(self) -> tuple[int, int]:
        """Return (groups under way, groups ready)."""
        with self.changed:
            ready = len(self.at(READY))
            return len(self._tasks) - ready, ready

    def sampled(self) -> int:
        """Return the number of groups of the next batch that are already sampled."""
        with self.changed:
            return self.gate.taken + min(self.gate.room, len(self._tasks) - len(self.at(GENERATE)))

    # -------------------------------------------------------------------------------------------------------- changes
    def issue(self) -> None:
        """Issue as many prompts as the staleness bound allows. Prompts restored from a checkpoint come first."""
        with self.changed:
            version = self.gate.version
            count = self.gate.may_issue(len(self._tasks))
            interrupted = [self._interrupted.popleft() for _ in range(min(count, len(self._interrupted)))]
            new = self.prompts.next(count - len(interrupted))
            prompts = [*interrupted, *new]
            for prompt, request in zip(prompts, self._requests(prompts), strict=True):
                self._tasks[prompt.group_id] = GroupTask(request, prompt=prompt, version=version)
            self.ledger.add([prompt.group_id for prompt in new], ISSUED, version=version)
            self.ledger.add([prompt.group_id for prompt in interrupted], REISSUED, version=version, reason="resumed")

    def resent(self, tasks: Sequence[GroupTask]) -> None:
        """Record groups that were sent again because their engine died."""
        if tasks:
            self.ledger.add(_ids(tasks), REISSUED, version=self.gate.version, reason="engine died")

    def move(self, tasks: Sequence[GroupTask], stage: str) -> None:
        with self.changed:
            for task in tasks:
                task.stage, task.engine, task.answer = stage, None, None
                self._tasks[task.prompt.group_id] = self._tasks.pop(task.prompt.group_id)

    def generated(self, tasks: Sequence[GroupTask]) -> None:
        """Pass on tasks with complete samples."""
        self.move(tasks, REWARD)
        self.ledger.add(_ids(tasks), GENERATED, version=self.gate.version)

    def rewarded(self, task: GroupTask, rewarded: RewardedGroup) -> None:
        """Give a task its rewards, or sample it again: with the same request, so that a run that was disturbed trains
        what it would have trained."""
        again = rewarded.resamples and task.resamples < _MAX_RESAMPLES
        for row in rewarded.failed:
            row.reward_metadata[OUTCOME] = RESAMPLED if again else MASKED
        failures = [*(row.reward_metadata for row in rewarded.failed), *rewarded.zeroed]
        with self.changed:
            for each in failures:
                self.ledger.add([task.prompt.group_id], FAILED, reason=f"{each[OUTCOME]}: {each['reason']}")
            self._failed.untrained += rewarded.failed
            if again:
                self.move([task], GENERATE)
                task.version, task.resamples = self.gate.version, task.resamples + 1
                self.ledger.add([task.prompt.group_id], REISSUED, version=task.version, reason="failed")
            else:
                task.rewarded, task.samples = rewarded, rewarded.group
                self._failed.rollouts += task.request.num_samples + task.request.greedy
                self._failed.failures += failures

    def check_failures(self) -> None:
        """Raise ``RewardError`` if too many rollouts have failed, of at least as many as a step has."""
        with self.changed:
            found, failed = self._failed, len(self._failed.failures)
            if found.rollouts >= found.step_rollouts and failed > found.max_fraction * found.rollouts:
                raise RewardError(
                    f"{failed} of {counted(found.rollouts, 'rollout')} for one step failed "
                    f"({failure_text(found.failures)}), more than reward.max_failed_fraction={found.max_fraction:g}",
                    code="too-many-failures",
                    remedy="correct what failed, or raise the fraction",
                )

    def take_failed(self) -> list[ScoredTrajectory]:
        """Return the failed rollouts that are not trained, by their last row, since the last call."""
        with self.changed:
            taken, self._failed.untrained = self._failed.untrained, []
            return taken

    def add_ready(self, tasks: Sequence[GroupTask]) -> None:
        """Pass on tasks that can be trained on."""
        if not tasks:
            return
        with self.changed:
            self.ledger.add(_ids(tasks), SCORED)
            self.move(tasks, READY)
            self.changed.notify_all()

    def drop(self, tasks: Sequence[GroupTask], reason: str) -> None:
        """Drop groups that cannot be trained. Others are issued in their place.

        Raises:
            RewardError: more than ``rollout.max_drops_per_step`` groups were dropped for one step.
        """
        if not tasks:
            return
        with self.changed:
            self.ledger.add(group_ids := _ids(tasks), SCORED)
            for group_id in group_ids:
                del self._tasks[group_id]
                self.ledger.add([group_id], DROPPED, reason=reason)
                self._dropped += 1
                if self._dropped > self._max_drops:
                    raise RewardError(
                        f"{self._dropped} groups for one step were dropped, the last one because of {reason}, more "
                        f"than rollout.max_drops_per_step={self._max_drops}",
                        code="too-many-drops",
                        remedy="choose prompts that are neither always nor never solved, or set "
                        "rollout.drop_zero_spread=false",
                    )
            self.changed.notify_all()

    def drop_oversampled(self) -> None:
        with self.changed:
            self.ledger.add(sorted(self._tasks), DROPPED, reason="oversampled")
            self._tasks.clear()

    # ---------------------------------------------------------------------------------------------------------- batch
    def may_take(self) -> int:
        """Return the number of ready groups that the batch may take now; see ``StalenessGate``."""
        with self.changed:
            under_way = [task.version for task in self._tasks.values() if task.stage != READY]
            return self.gate.may_take([task.version for task in self.at(READY)], under_way)

    def take(self, at_least: int = 1) -> list[RewardedGroup]:
        """Return all groups that the batch may take, in id order, or none if there are fewer than ``at_least``."""
        with self.changed:
            count = self.may_take()
            if count < at_least:
                return []
            oldest_first = sorted(self.at(READY), key=lambda task: task.version)
            formed = self.gate.formed
            self.gate.take(count)
            if self.gate.formed > formed:
                self._dropped = 0
                self._failed.formed()
            return [self._tasks.pop(group_id).rewarded for group_id in sorted(_ids(oldest_first[:count]))]

    # ---------------------------------------------------------------------------------------------------------- state
    def state_dict(self) -> dict[str, Any]:
        """Return the positions of prompts and ledger, and the prompts that were issued but not trained, for JSON.

        A thread may issue more before the ledger is copied: events after ``ledger_events`` are not part of the state.
        """
        with self.changed:
            unfinished = [*self._interrupted, *(task.prompt for task in self._tasks.values())]
            return {
                "data": self.prompts.state_dict(),
                "in_flight": [_fields(prompt) for prompt in sorted(unfinished, key=lambda prompt: prompt.group_id)],
                "ledger_events": self.ledger.count(),
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from ``state_dict``. Groups that were under way are issued again before new ones."""
        self.prompts.load_state_dict(state["data"])
        self._interrupted = deque(_prompt(fields) for fields in state.get("in_flight", ()))


def _ids(tasks: Sequence[GroupTask]) -> list[int]:
    return [task.prompt.group_id for task in tasks]


def _fields(prompt: Prompt) -> dict[str, Any]:
    """Convert a prompt for JSON, without unset fields of agents, demonstrated conversations and inputs."""
    arrays = {name: (str(each.dtype), each.tolist()) for name, each in prompt.input.fields.items()}
    fields = asdict(prompt) | {"tokens": list(prompt.input.token_ids), "inputs": arrays or None}
    del fields["input"]
    optional = ("messages", "spans", "forks", "whole_row", "inputs", "source")
    return {name: value for name, value in fields.items() if name not in optional or value is not None}


def _prompt(fields: dict[str, Any]) -> Prompt:
    """Build a prompt without a demonstration from JSON."""
    others = {name: value for name, value in fields.items() if name not in ("tokens", "inputs")}
    arrays = {name: np.array(values, dtype) for name, (dtype, values) in fields.get("inputs", {}).items()}
    return Prompt(PromptInput(fields["tokens"], arrays), **others)
