"""The replay buffer: what is oldest leaves first, once, and nothing that is too old."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_like.orchestration.rollout.replay import ReplayBuffer
from tests.support.rejections import Rejects


def filled(*versions: int, max_staleness: int = 9) -> ReplayBuffer[str]:
    buffer: ReplayBuffer[str] = ReplayBuffer(max_staleness)
    for group_id, version in enumerate(versions):
        buffer.add(group_id, version, f"content {group_id}")
    return buffer


def test_the_oldest_weights_first_then_what_came_first() -> None:
    buffer = filled(3, 1, 2, 1, 3)
    assert [held.group_id for held in buffer.take(3)] == [1, 2, 3]  # versions 1, 1, 2; in the order of their ids
    assert [held.content for held in buffer.take(1)] == ["content 0"]
    assert len(buffer) == 1


def test_too_few_are_not_handed_out(rejects: Rejects) -> None:
    buffer = filled(0, 0)
    with rejects(ValueError):
        buffer.take(3)
    assert len(buffer) == 2


def test_a_group_comes_in_once(rejects: Rejects) -> None:
    buffer = filled(0)
    with rejects(ValueError):
        buffer.add(0, 1, "again")


@pytest.mark.parametrize(("bound", "current", "kept"), [(0, 5, True), (0, 6, False), (2, 7, True), (2, 8, False)])
def test_the_staleness_bound_is_inclusive(bound: int, current: int, kept: bool) -> None:
    buffer = filled(5, max_staleness=bound)
    assert buffer.drop_stale(current) == ([] if kept else [0])
    assert len(buffer) == int(kept)


def test_a_negative_bound_is_refused(rejects: Rejects) -> None:
    with rejects(ValueError):
        ReplayBuffer(-1)


@given(st.lists(st.integers(0, 5), max_size=30), st.lists(st.integers(1, 7), max_size=10))
def test_every_group_leaves_once(versions: list[int], takes: list[int]) -> None:
    buffer = filled(*versions)
    left = []
    for n in takes:
        if n <= len(buffer):
            taken = buffer.take(n)
            assert max(held.version for held in taken) <= min((held.version for held in buffer), default=99)
            left += [held.group_id for held in taken]
    left += [held.group_id for held in buffer]
    assert sorted(left) == list(range(len(versions)))
