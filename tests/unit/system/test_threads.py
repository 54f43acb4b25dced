"""Jobs in threads, and interrupts that a library swallows."""

import faulthandler
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from slime_like.system import interrupts
from slime_like.system.interrupts import (
    InterruptHandler,
    TimeLimitExceeded,
    raise_if_interrupted,
    take_interrupt,
    take_signals_back,
    time_limit,
)
from slime_like.system.threads import Tracker, run_jobs


def test_every_result_arrives_and_progress_ends_at_the_sum() -> None:
    results: list[int] = []
    progress: list[int] = []

    def work(job: int, tracker: Tracker) -> int:
        tracker.advance(job)
        return job * job

    run_jobs(range(1, 8), work, 3, results.append, progress.append)
    assert sorted(results) == [1, 4, 9, 16, 25, 36, 49]
    assert progress == sorted(progress) and progress[-1] == 28
    run_jobs([], lambda job, tracker: job, 2, lambda result: None, lambda done: None)


def test_a_failure_stops_the_others_between_two_tensors() -> None:
    """The other job would run forever. The first failure is raised, not the stop."""
    going = threading.Event()

    def work(job: str, tracker: Tracker) -> str:
        if job == "fails":
            assert going.wait(10)
            raise ValueError("broken")
        while True:
            tracker.advance(1)
            going.set()

    with pytest.raises(ValueError, match="broken"):
        run_jobs(["endless", "fails", "never started"], work, 2, lambda result: None, lambda done: None)


def test_an_interrupt_in_the_reporting_thread_stops_all() -> None:
    def work(job: int, tracker: Tracker) -> int:
        while True:
            tracker.advance(1)

    with pytest.raises(KeyboardInterrupt):
        run_jobs([1, 2], work, 2, lambda result: None, Mock(side_effect=KeyboardInterrupt))


def test_results_before_an_interrupt_are_not_lost() -> None:
    """The second job ends while the first one's result is handled."""
    both, results = threading.Barrier(2), []

    def work(job: int, tracker: Tracker) -> int:
        both.wait(10)
        return job

    with pytest.raises(KeyboardInterrupt):
        run_jobs([1, 2], work, 2, results.append, Mock(side_effect=KeyboardInterrupt))
    assert sorted(results) == [1, 2]


@pytest.fixture(autouse=True)
def installed() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    for number in before:
        signal.signal(number, InterruptHandler())
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupt_is_raised_once(number: signal.Signals) -> None:
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), number)
    with pytest.raises(KeyboardInterrupt):  # a library may have caught the first
        raise_if_interrupted()
    raise_if_interrupted()
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), number)
    take_interrupt()
    raise_if_interrupted()  # it is handled


def test_a_handler_installed_in_c_is_replaced(tmp_path: Path) -> None:
    """``faulthandler`` acts like Ray's C++ here: it writes before it passes a signal on to Python."""
    with (tmp_path / "said").open("w+") as said:
        faulthandler.register(signal.SIGTERM, file=said, chain=True)
        take_signals_back()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        assert said.read() == ""


def test_a_time_limit_touches_only_code_that_exceeds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.11 hangs under a profiler once an interruption was withdrawn that no thread had received."""
    raise_in, calls = interrupts._raise_in, list[bool]()
    monkeypatch.setattr(interrupts, "_raise_in", lambda *given: [calls.append(given[1] is None), raise_in(*given)])
    with time_limit(60.0):
        sum(range(100))
    assert calls == []
    with pytest.raises(TimeLimitExceeded), time_limit(0.1):
        while True:
            sum(range(100))
    assert calls[0] is False and calls[-1] is True
