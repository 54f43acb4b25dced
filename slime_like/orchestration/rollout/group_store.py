"""GroupStore: every prompt group from its issue to its training step."""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from slime_like.config.rollout import RolloutConfig
from slime_like.data.ledger import Ledger
from slime_like.data.prompts import Prompt, PromptSource
from slime_like.errors import RewardError
from slime_like.interfaces import PromptInput
from slime_like.orchestration.rollout.scoring import RewardedGroup
from slime_like.orchestration.rollout.staleness import StalenessGate


@dataclass(slots=True)
class _Group:
    """A group that is issued and not trained.

    Attributes:
        version: earliest weight version that may sample its first token.
        is_sampled: whether its samples are complete.
        rewarded: the group once it is ready for training.
    """

    prompt: Prompt
    version: int
    is_sampled: bool = False
    rewarded: RewardedGroup | None = None


class GroupStore:
    """Groups to issue again, under way, and ready for training. The ledger records every change. Thread-safe.

    Args:
        steps: number of steps of the run.

    Attributes:
        changed: guards the state; notified when a batch may take more groups or more may be issued.
    """

    def __init__(self, rollout: RolloutConfig, steps: int, prompts: PromptSource, ledger: Ledger) -> None:
        self.changed = threading.Condition()
        self._gate = StalenessGate(rollout.prompts_per_step, rollout.max_staleness, steps, rollout.oversample)
        self._prompts = prompts
        self._ledger = ledger
        self._max_drops = rollout.max_drops_per_step
        self._interrupted: deque[Prompt] = deque()
        self._groups: dict[int, _Group] = {}  # ready ones in order of arrival
        self._dropped = 0

    # ------------------------------------------------------------------------------------------------------- position
    @property
    def version(self) -> int:
        """Weight version that the engines serve."""
        return self._gate.version

    @property
    def formed(self) -> int:
        """Last step whose batch is complete."""
        return self._gate.formed

    def serve(self, version: int) -> None:
        """Record that the engines serve ``version`` from now on."""
        with self.changed:
            self._gate.serve(version)
            self.changed.notify_all()

    def sizes(self) -> tuple[int, int]:
        """Return (groups under way, groups ready)."""
        with self.changed:
            ready = len(self._ready())
            return len(self._groups) - ready, ready

    def sampled(self) -> int:
        """Return the number of groups of the next batch that are already sampled."""
        with self.changed:
            sampled = sum(group.is_sampled for group in self._groups.values())
            return self._gate.taken + min(self._gate.room, sampled)

    def _ready(self) -> dict[int, RewardedGroup]:
        return {group_id: g.rewarded for group_id, g in self._groups.items() if g.rewarded is not None}

    # -------------------------------------------------------------------------------------------------------- changes
    def issue(self) -> list[Prompt]:
        """Issue as many prompts as the staleness bound allows. Prompts restored from a checkpoint come first."""
        with self.changed:
            version = self._gate.version
            count = self._gate.may_issue(len(self._groups))
            interrupted = [self._interrupted.popleft() for _ in range(min(count, len(self._interrupted)))]
            new = self._prompts.next(count - len(interrupted))
            for prompt in (*interrupted, *new):
                self._groups[prompt.group_id] = _Group(prompt, version)
            self._ledger.issued([prompt.group_id for prompt in new], version)
            self._ledger.reissued([prompt.group_id for prompt in interrupted], version, "resumed")
        return [*interrupted, *new]

    def resent(self, group_ids: Sequence[int]) -> None:
        """Record groups that were sent again because their engine died."""
        if group_ids:
            self._ledger.reissued(group_ids, self.version, "engine died")

    def generated(self, group_ids: Sequence[int]) -> None:
        """Record groups with complete samples."""
        with self.changed:
            for group_id in group_ids:
                self._groups[group_id].is_sampled = True
        self._ledger.generated(group_ids, self.version)

    def add_ready(self, groups: Sequence[RewardedGroup]) -> None:
        """Add groups that can be trained on."""
        if not groups:
            return
        with self.changed:
            self._ledger.scored([rewarded.group.group_id for rewarded in groups])
            for rewarded in groups:
                group_id = rewarded.group.group_id
                self._groups[group_id] = replace(self._groups.pop(group_id), rewarded=rewarded)
            self.changed.notify_all()

    def drop_without_spread(self, group_ids: Sequence[int]) -> None:
        """Drop groups whose samples all have the same reward. Others are issued in their place.

        Raises:
            RewardError: more than ``rollout.max_drops_per_step`` groups were dropped for one step.
        """
        if not group_ids:
            return
        with self.changed:
            self._ledger.scored(group_ids)
            for group_id in group_ids:
                del self._groups[group_id]
                self._ledger.dropped([group_id], "zero spread")
                self._dropped += 1
                self._require_few_drops()
            self.changed.notify_all()

    def _require_few_drops(self) -> None:
        if self._dropped > self._max_drops:
            raise RewardError(
                f"{self._dropped} groups for one step were dropped because all their samples had the same "
                f"reward, more than rollout.max_drops_per_step={self._max_drops}",
                code="too-many-drops",
                remedy="choose prompts that are neither always nor never solved, or set rollout.drop_zero_spread=false",
            )

    def drop_oversampled(self) -> None:
        """Drop the groups left over from a complete batch."""
        with self.changed:
            self._ledger.dropped(sorted(self._groups), "oversampled")
            self._groups.clear()

    # ---------------------------------------------------------------------------------------------------------- batch
    def may_take(self) -> int:
        """Return the number of ready groups that the batch may take now; see ``StalenessGate``."""
        with self.changed:
            ready = [group.version for group in self._groups.values() if group.rewarded is not None]
            under_way = [group.version for group in self._groups.values() if group.rewarded is None]
            return self._gate.may_take(ready, under_way)

    def take(self, at_least: int = 1) -> list[RewardedGroup]:
        """Return all groups that the batch may take, in id order, or none if there are fewer than ``at_least``."""
        with self.changed:
            count = self.may_take()
            if count < at_least:
                return []
            ready = self._ready()
            oldest_first = sorted(ready, key=lambda group_id: self._groups[group_id].version)
            formed = self._gate.formed
            self._gate.take(count)
            if self._gate.formed > formed:
                self._dropped = 0
            taken = sorted(oldest_first[:count])
            for group_id in taken:
                del self._groups[group_id]
            return [ready[group_id] for group_id in taken]

    # ---------------------------------------------------------------------------------------------------------- state
    def state_dict(self) -> dict[str, Any]:
        """Return the positions of prompts and ledger, and the prompts that were issued but not trained, for JSON.

        A thread may issue more before the ledger is copied: events after ``ledger_events`` are not part of the state.
        """
        with self.changed:
            unfinished = [*self._interrupted, *(group.prompt for group in self._groups.values())]
            return {
                "data": self._prompts.state_dict(),
                "in_flight": [_fields(prompt) for prompt in sorted(unfinished, key=lambda prompt: prompt.group_id)],
                "ledger_events": self._ledger.count(),
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from ``state_dict``. Groups that were under way are issued again before new ones."""
        self._prompts.load_state_dict(state["data"])
        self._interrupted = deque(_prompt(fields) for fields in state.get("in_flight", ()))


def _fields(prompt: Prompt) -> dict[str, Any]:
    """Convert a prompt for JSON, without unset fields of agents, demonstrated conversations and inputs."""
    arrays = {name: (str(each.dtype), each.tolist()) for name, each in prompt.input.fields.items()}
    fields = asdict(prompt) | {"tokens": list(prompt.input.token_ids), "inputs": arrays or None}
    del fields["input"]
    optional = ("messages", "spans", "forks", "whole_row", "inputs")
    return {name: value for name, value in fields.items() if name not in optional or value is not None}


def _prompt(fields: dict[str, Any]) -> Prompt:
    """Build a prompt without a demonstration from JSON."""
    others = {name: value for name, value in fields.items() if name not in ("tokens", "inputs")}
    arrays = {name: np.array(values, dtype) for name, (dtype, values) in fields.get("inputs", {}).items()}
    return Prompt(PromptInput(fields["tokens"], arrays), **others)
