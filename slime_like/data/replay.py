"""ReplayBuffer: scored trajectories waiting to be trained on."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

from slime_like.trajectory import ScoredTrajectory


class ReplayBuffer:
    """Holds at most ``capacity`` trajectories and hands each out once per epoch, in random order.

    A trajectory is stale when the policy has moved on by more than ``max_staleness`` versions since its first token was
    sampled. What leaves the buffer without having been asked for is counted in ``dropped``, by reason.

    Args:
        capacity: most trajectories held; the oldest make room.
        max_staleness: 0 is strictly on-policy.
        seed: seed of the order.

    Attributes:
        dropped: "stale" and "capacity": how many trajectories left for that reason.
    """

    def __init__(self, capacity: int, max_staleness: int, seed: int) -> None:
        if capacity < 1 or max_staleness < 0:
            raise ValueError(
                f"capacity={capacity} must be at least 1 and max_staleness={max_staleness} at least 0; raise them"
            )
        self._capacity = capacity
        self._max_staleness = max_staleness
        self._random = random.Random(seed)
        self._held: dict[str, ScoredTrajectory] = {}  # oldest first
        self._used: set[str] = set()
        self.dropped: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._held)

    @property
    def num_unused(self) -> int:
        """Trajectories not yet handed out in this epoch."""
        return len(self._held) - len(self._used)

    def add(self, trajectories: Sequence[ScoredTrajectory]) -> None:
        """Put trajectories in; the oldest of the buffer are dropped where they exceed the capacity.

        Raises:
            ValueError: a sequence id is in the buffer already.
        """
        for trajectory in trajectories:
            name = trajectory.sequence_id
            if name in self._held:
                raise ValueError(f"trajectory {name} is in the replay buffer already; sequence ids must be unique")
            self._held[name] = trajectory
        excess = max(0, len(self._held) - self._capacity)
        self._drop(list(self._held)[:excess], "capacity")

    def drop_stale(self, current_version: int) -> int:
        """Drop what is too old to train version ``current_version`` with; returns how many."""
        oldest_allowed = current_version - self._max_staleness
        stale = [name for name, trajectory in self._held.items() if trajectory.policy_version < oldest_allowed]
        self._drop(stale, "stale")
        return len(stale)

    def sample(self, n: int, current_version: int) -> list[ScoredTrajectory]:
        """``n`` trajectories that are not stale and were not handed out in this epoch, in random order.

        Raises:
            ValueError: there are fewer; nothing is handed out then.
        """
        self.drop_stale(current_version)
        unused = [name for name in self._held if name not in self._used]
        if n > len(unused):
            raise ValueError(
                f"{n} trajectories wanted, {len(unused)} unused ones are in the replay buffer; add more, or start a "
                "new epoch"
            )
        names = self._random.sample(unused, n)
        self._used.update(names)
        return [self._held[name] for name in names]

    def start_epoch(self) -> None:
        """Let every trajectory in the buffer be handed out once more."""
        self._used.clear()

    def clear(self) -> None:
        """Forget everything; nothing is counted as dropped."""
        self._held.clear()
        self._used.clear()

    def _drop(self, names: Sequence[str], reason: str) -> None:
        for name in names:
            del self._held[name]
            self._used.discard(name)
        self.dropped[reason] += len(names)
