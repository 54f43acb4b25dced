"""The replay buffer: capacity, staleness, no repeats within an epoch, and every drop counted."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_like.data.replay import ReplayBuffer
from slime_like.trajectory import ScoredTrajectory


def trajectory(name: str, version: int = 0) -> ScoredTrajectory:
    return ScoredTrajectory(
        prompt_tokens=torch.tensor([1]),
        response_tokens=torch.tensor([2]),
        prompt_len=1,
        response_len=1,
        logprobs=None,
        ref_logprobs=None,
        rewards=torch.zeros(1),
        advantages=torch.tensor(0.0),
        successes=torch.zeros(1),
        answer="",
        sequence_id=name,
        group_id=0,
        reward_metadata={},
        policy_version=version,
        loss_mask=torch.ones(1, dtype=torch.bool),
    )


def names(trajectories: list[ScoredTrajectory]) -> list[str]:
    return [item.sequence_id for item in trajectories]


def filled(count: int, capacity: int = 100, max_staleness: int = 0, seed: int = 0) -> ReplayBuffer:
    buffer = ReplayBuffer(capacity, max_staleness, seed)
    buffer.add([trajectory(str(i)) for i in range(count)])
    return buffer


def test_an_epoch_hands_out_each_once_in_an_order_of_the_seed() -> None:
    buffer = filled(20)
    first = names(buffer.sample(8, 0)) + names(buffer.sample(12, 0))
    assert sorted(first) == sorted(map(str, range(20)))
    assert first != [str(i) for i in range(20)]
    with pytest.raises(ValueError, match="1 trajectories wanted, 0 unused"):
        buffer.sample(1, 0)
    buffer.start_epoch()
    second = names(buffer.sample(20, 0))
    assert sorted(second) == sorted(first)
    assert second != first
    assert names(filled(20).sample(8, 0)) == first[:8]
    assert names(filled(20, seed=1).sample(8, 0)) != first[:8]


def test_a_refused_sample_hands_out_nothing() -> None:
    buffer = filled(3)
    with pytest.raises(ValueError, match="4 trajectories wanted, 3 unused"):
        buffer.sample(4, 0)
    assert buffer.num_unused == 3


# a trajectory of version 3 under versions of the policy: is it still there?
@pytest.mark.parametrize(("bound", "current", "kept"), [(0, 3, True), (0, 4, False), (2, 5, True), (2, 6, False)])
def test_the_staleness_bound_is_inclusive(bound: int, current: int, kept: bool) -> None:
    buffer = ReplayBuffer(10, bound, 0)
    buffer.add([trajectory("old", 3)])
    assert buffer.drop_stale(current) == (0 if kept else 1)
    assert len(buffer) == int(kept)
    assert buffer.dropped == Counter({"stale": 0 if kept else 1})


def test_sampling_never_returns_a_stale_one() -> None:
    buffer = ReplayBuffer(10, 1, 0)
    buffer.add([trajectory(f"v{version}", version) for version in range(6)])
    assert sorted(names(buffer.sample(2, 5))) == ["v4", "v5"]
    assert buffer.dropped["stale"] == 4


def test_the_oldest_make_room_and_are_counted() -> None:
    buffer = filled(3, capacity=3)
    buffer.sample(3, 0)
    buffer.start_epoch()
    buffer.add([trajectory("new"), trajectory("newer")])
    assert sorted(names(buffer.sample(3, 0))) == ["2", "new", "newer"]
    assert buffer.dropped["capacity"] == 2


def test_a_second_trajectory_of_one_name_is_refused() -> None:
    with pytest.raises(ValueError, match="trajectory 1 is in the replay buffer already"):
        filled(2).add([trajectory("1")])


@pytest.mark.parametrize(("capacity", "staleness"), [(0, 0), (1, -1)])
def test_senseless_bounds_are_refused(capacity: int, staleness: int) -> None:
    with pytest.raises(ValueError, match="raise them"):
        ReplayBuffer(capacity, staleness, 0)


@settings(max_examples=50, deadline=None)
@given(steps=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), max_size=12), bound=st.integers(0, 3))
def test_nothing_is_lost_or_doubled(steps: list[tuple[int, int]], bound: int) -> None:
    """Whatever is put in is handed out, still there, or counted as dropped; nothing twice in an epoch."""
    buffer = ReplayBuffer(capacity=8, max_staleness=bound, seed=0)
    seen: list[str] = []
    added = 0
    for version, (put, take) in enumerate(steps):
        buffer.add([trajectory(str(added + i), version) for i in range(put)])
        added += put
        buffer.drop_stale(version)
        seen += names(buffer.sample(min(take, buffer.num_unused), version))
        assert len(buffer) <= 8
    assert len(seen) == len(set(seen))
    assert len(buffer) + sum(buffer.dropped.values()) == added
    buffer.clear()
    assert len(buffer) == buffer.num_unused == 0
