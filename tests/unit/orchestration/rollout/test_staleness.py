"""The staleness bound against its rule: every group that exists can still be trained in time.

A group of version v may be trained in steps up to v + max_staleness + 1. The tests try every order of the groups left
behind, instead of the gate's arithmetic.
"""

from itertools import permutations

from hypothesis import assume, given
from hypothesis import strategies as st

from slime_like.orchestration.rollout.issue import StalenessGate


def in_time(versions: list[int], step: int, room: int, batch_size: int, max_staleness: int) -> bool:
    """Return whether some order of the groups trains each in time: ``room`` groups in ``step``, then whole batches."""

    def trained_in(place: int) -> int:
        return step if place < room else step + 1 + (place - room) // batch_size

    return any(
        all(trained_in(place) - 1 - version <= max_staleness for place, version in enumerate(order))
        for order in permutations(versions)
    )


@given(st.data(), st.integers(1, 3), st.integers(0, 2), st.integers(0, 3))
def test_a_batch_takes_the_most_that_leaves_the_others_in_time(
    data: st.DataObject, batch_size: int, max_staleness: int, version: int
) -> None:
    gate = StalenessGate(batch_size, max_staleness, steps=10)
    formed = version + data.draw(st.integers(0, max_staleness), "batches formed ahead of the served version")
    for _ in range(formed):
        gate.take(batch_size)
    gate.serve(version)
    gate.take(data.draw(st.integers(0, batch_size - 1), "taken"))
    versions = st.integers(max(0, formed - max_staleness), version)  # none is too old for the step that is formed
    ready = data.draw(st.lists(versions, max_size=4), "ready")
    under_way = data.draw(st.lists(versions, max_size=6 - len(ready)), "under way")
    room = batch_size - gate.taken
    possible = [
        count
        for count in range(min(room, len(ready)) + 1)
        if in_time([*sorted(ready)[count:], *under_way], formed + 1, room - count, batch_size, max_staleness)
    ]
    assert gate.may_take(ready, under_way) == max(possible, default=0)


@given(st.integers(1, 5), st.integers(0, 3), st.integers(1, 8), st.data())
def test_prompts_are_issued_until_the_batches_that_may_exist_are_full(
    batch_size: int, max_staleness: int, steps: int, data: st.DataObject
) -> None:
    """Count trained groups, groups in the batch, and held groups of the whole run, one by one."""
    gate = StalenessGate(batch_size, max_staleness, steps)
    gate.serve(formed := data.draw(st.integers(0, steps), "formed"))
    ahead = data.draw(st.integers(0, max_staleness), "batches formed ahead of the served version")
    assume(formed + ahead <= steps)
    for _ in range(ahead):
        gate.take(batch_size)
    gate.take(taken := data.draw(st.integers(0, batch_size - 1), "taken"))
    held = data.draw(st.integers(0, 3 * batch_size), "held")
    existing = (formed + ahead) * batch_size + taken + held
    issued = 0
    while existing + issued < batch_size * steps and existing + issued < batch_size * (formed + max_staleness + 1):
        issued += 1
    assert gate.may_issue(held) == issued


@given(st.integers(1, 6), st.floats(1.01, 4.0), st.integers(0, 20))
def test_oversampling_issues_more_and_leaves_none_for_later(batch_size: int, oversample: float, ready: int) -> None:
    gate = StalenessGate(batch_size, 0, steps=2, oversample=oversample)
    issued = gate.may_issue(0)
    assert issued - 1 < batch_size * oversample <= issued
    assert gate.may_take([0] * ready, [0] * 20) == min(batch_size, ready)
