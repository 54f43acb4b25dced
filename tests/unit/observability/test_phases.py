"""The clock with a time source made by hand. No test depends on real time."""

import pytest

from slime_like.observability.records import PhaseClock


def clock_at(*seconds: float) -> PhaseClock:
    """Return a clock that reads these times: at its start, at the begin and end of each phase, and at ``finish``."""
    return PhaseClock(iter([12_345 + round(moment * 1e9) for moment in seconds]).__next__)


def test_times_by_phase() -> None:
    clock = clock_at(0, 0.25, 2.25, 2.75, 3.75, 3.75, 4, 4, 4, 5, 5)
    for phase in ("generate", "train", "generate"):  # a repeated phase adds up
        with clock.phase(phase):
            pass
    times = clock.finish()
    assert times.seconds == {"wait": 0, "generate": 2.25, "reward": 0, "score": 0, "critic": 0, "train": 1.0, "sync": 0}
    assert (times.step_s, times.orchestration_s) == (4.0, 0.75)
    with clock.phase("wait"):
        pass
    times = clock.finish()
    assert (times.step_s, times.seconds["wait"], times.seconds["generate"]) == (1.0, 1.0, 0.0)


def test_errors_leave_the_clock_usable() -> None:
    clock = clock_at(0, 0, 2, 2, 3, 3)
    with pytest.raises(KeyError), clock.phase("score"):
        raise KeyError
    with clock.phase("train"), pytest.raises(RuntimeError), clock.phase("score"):
        pass
    seconds = clock.finish().seconds
    assert (seconds["score"], seconds["train"]) == (2.0, 1.0)
