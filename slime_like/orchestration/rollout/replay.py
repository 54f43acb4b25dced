"""ReplayBuffer: scored groups waiting to be trained on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Held(Generic[T]):
    """A group in the buffer.

    Attributes:
        group_id: unique over the run.
        version: weight version that its first token may have been sampled by, at the earliest.
        content: the group itself.
    """

    group_id: int
    version: int
    content: T


class ReplayBuffer(Generic[T]):
    """Hands every group out once, those of the oldest weights first, and none that is too old.

    A group is stale when the policy has moved on by more than ``max_staleness`` versions since its first token.

    Args:
        max_staleness: 0 is strictly on-policy.
    """

    def __init__(self, max_staleness: int) -> None:
        if max_staleness < 0:
            raise ValueError(f"max_staleness={max_staleness} is negative; 0 is strictly on-policy")
        self._max_staleness = max_staleness
        self._held: dict[int, Held[T]] = {}  # in order of arrival

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Held[T]]:
        return iter(list(self._held.values()))

    def add(self, group_id: int, version: int, content: T) -> None:
        """Put a group in.

        Raises:
            ValueError: it is in the buffer already.
        """
        if group_id in self._held:
            raise ValueError(f"group {group_id} is in the replay buffer already; group ids must be unique")
        self._held[group_id] = Held(group_id, version, content)

    def drop_stale(self, current_version: int) -> list[int]:
        """Drop what is too old to train version ``current_version``; the ids of what was dropped."""
        oldest_allowed = current_version - self._max_staleness
        stale = [group.group_id for group in self._held.values() if group.version < oldest_allowed]
        for group_id in stale:
            del self._held[group_id]
        return stale

    def take(self, n: int) -> list[Held[T]]:
        """``n`` groups: the oldest versions first, then those that came first; in the order of their ids.

        Raises:
            ValueError: there are fewer; nothing is handed out then.
        """
        if n > len(self._held):
            raise ValueError(f"{n} groups wanted, {len(self._held)} are in the replay buffer; wait for more")
        chosen = sorted(self._held.values(), key=lambda group: group.version)[:n]
        for group in chosen:
            del self._held[group.group_id]
        return sorted(chosen, key=lambda group: group.group_id)
