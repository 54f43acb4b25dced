"""ReplayBuffer: scored groups that are ready for training."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Held(Generic[T]):
    """A group of the buffer.

    Attributes:
        version: oldest weights that may have sampled its first token.
    """

    group_id: int
    version: int
    content: T


class ReplayBuffer(Generic[T]):
    """Returns every group once, oldest weights first, and none that is too old.

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
        """Add a group.

        Raises:
            ValueError: the buffer has it already.
        """
        if group_id in self._held:
            raise ValueError(f"group {group_id} is in the replay buffer already; group ids must be unique")
        self._held[group_id] = Held(group_id, version, content)

    def drop_stale(self, current_version: int) -> list[int]:
        """Drop groups that are too old to train version ``current_version``; returns their ids."""
        oldest_allowed = current_version - self._max_staleness
        stale = [group.group_id for group in self._held.values() if group.version < oldest_allowed]
        for group_id in stale:
            del self._held[group_id]
        return stale

    def take(self, n: int) -> list[Held[T]]:
        """Remove ``n`` groups: oldest versions first, then those added first; returned in the order of their ids.

        Raises:
            ValueError: there are fewer; none is removed.
        """
        if n > len(self._held):
            raise ValueError(f"{n} groups wanted, {len(self._held)} are in the replay buffer; wait for more")
        chosen = sorted(self._held.values(), key=lambda group: group.version)[:n]
        for group in chosen:
            del self._held[group.group_id]
        return sorted(chosen, key=lambda group: group.group_id)
