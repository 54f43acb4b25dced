"""Times at which stopped processes are reported and ended."""

from slime_like.orchestration.cluster.stopped import END_AFTER_S, REPORT_AFTER_S, Stopped, StopWatch, recently_ended
from slime_like.orchestration.cluster.worker_watch import LOOK_EVERY_S

_RANK = Stopped("10.0.0.1", 7, 100.0, "trainer-0")
_SAME_ID_LATER = Stopped("10.0.0.1", 7, 200.0, "trainer-0")
_ENGINE = Stopped("10.0.0.2", 7, 100.0, "engine-1")


def _times(stopped: dict[Stopped, tuple[float, float]], until: float) -> dict[str, list[float]]:
    """Return the times of reports and ends, given from when until when each process is stopped."""
    watch, found = StopWatch(), {"notes": [], "ends": []}
    now = 0.0
    while now < until:
        now += LOOK_EVERY_S
        notes, end = watch.look([one for one, (begin, over) in stopped.items() if begin < now <= over], now)
        found["notes"] += [now] * len(notes)
        found["ends"] += [now] * len(end)
    return found


def test_the_default_times_keep_the_bounds() -> None:
    """They hold wherever the stop falls between two checks."""
    for begin in (0.0, 7.0, LOOK_EVERY_S - 0.1):
        found = _times({_RANK: (begin, 130.0)}, 130.0)
        assert found["notes"][0] - begin <= 60 and found["ends"][0] - begin <= 120 - LOOK_EVERY_S
        assert found["ends"][0] - begin >= END_AFTER_S


def test_each_process_has_separate_times() -> None:
    last = LOOK_EVERY_S + END_AFTER_S
    once = _times({_RANK: (0.0, last)}, 300.0)
    assert once == {"notes": [LOOK_EVERY_S + REPORT_AFTER_S, last], "ends": [last]}
    later = _times({_RANK: (0.0, last), _ENGINE: (60.0, 60.0 + last)}, 300.0)
    assert later["ends"] == [last, last + 60.0] and len(later["notes"]) == 4


def test_a_process_that_continues_is_not_ended() -> None:
    """A later process with the same id is another process."""
    pauses = {_RANK: (0.0, 80.0), _SAME_ID_LATER: (90.0, 170.0)}
    assert _times(pauses, 400.0) == {"notes": [45.0, 135.0], "ends": []}


def test_a_failure_long_after_an_end_has_another_cause() -> None:
    watch = StopWatch()
    assert recently_ended(watch.ended.values(), 0.0) is None
    watch.look([_RANK], 0.0)
    watch.look([_RANK], END_AFTER_S)
    ended = recently_ended(watch.ended.values(), END_AFTER_S + 20)
    assert ended is not None and "trainer-0" in ended.reason
    assert recently_ended(watch.ended.values(), END_AFTER_S + 90) is None
