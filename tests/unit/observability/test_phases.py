"""The clock against a hand-made time line: no test here depends on real time."""

import pytest

from slime_like.observability.phases import PHASES, PhaseClock
from tests.support.rejections import Rejects

SECOND = 1_000_000_000


class Time:
    """A time source that only the test moves."""

    def __init__(self) -> None:
        self.ns = 12_345

    def __call__(self) -> int:
        return self.ns

    def move(self, seconds: float) -> None:
        self.ns += round(seconds * SECOND)


@pytest.fixture
def time() -> Time:
    return Time()


def test_times_go_to_their_phase_and_the_rest_to_orchestration(time: Time) -> None:
    clock = PhaseClock(time)
    time.move(0.25)
    with clock.phase("generate"):
        time.move(2.0)
    time.move(0.5)
    with clock.phase("train"):
        time.move(1.0)
    with clock.phase("generate"):  # the same phase twice adds up
        time.move(0.25)
    times = clock.finish()
    assert times.seconds == {"wait": 0, "generate": 2.25, "reward": 0, "score": 0, "train": 1.0, "sync": 0}
    assert (times.step_s, times.orchestration_s) == (4.0, 0.75)


def test_finish_starts_the_next_step(time: Time) -> None:
    clock = PhaseClock(time)
    with clock.phase("sync"):
        time.move(3.0)
    clock.finish()
    with clock.phase("wait"):
        time.move(1.0)
    times = clock.finish()
    assert (times.step_s, times.seconds["wait"], times.seconds["sync"]) == (1.0, 1.0, 0.0)


def test_the_parts_add_up_to_the_step_on_a_real_clock() -> None:
    clock = PhaseClock()
    for _ in range(200):
        for phase in PHASES:
            with clock.phase(phase):
                pass
    times = clock.finish()
    assert sum(times.seconds.values()) + times.orchestration_s == pytest.approx(times.step_s, rel=1e-12)
    assert min(*times.seconds.values(), times.orchestration_s) >= 0


def test_a_phase_that_raises_is_counted_and_closed(time: Time) -> None:
    clock = PhaseClock(time)
    with pytest.raises(KeyError), clock.phase("score"):
        time.move(1.0)
        raise KeyError
    with clock.phase("train"):
        time.move(1.0)
    assert clock.finish().seconds["score"] == 1.0


def test_misuse_is_refused_and_leaves_the_clock_usable(time: Time, rejects: Rejects) -> None:
    clock = PhaseClock(time)
    with rejects(ValueError), clock.phase("sleep"):
        pass
    with clock.phase("train"):
        with rejects(RuntimeError), clock.phase("score"):
            pass
        with rejects(RuntimeError):
            clock.finish()
        time.move(1.0)
    assert clock.finish().seconds["train"] == 1.0
