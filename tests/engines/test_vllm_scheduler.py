"""The scheduler for vLLM on a CPU, which waits for a burst of requests."""

from typing import Any

import pytest


def test_only_the_first_request_of_a_burst_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler  # takes seconds

    from rollout.vllm import scheduler

    events: list[Any] = []
    held: list[Any] = []

    def add(self: Scheduler, request: Any) -> None:
        held.append(request)
        events.append(request)

    monkeypatch.setattr(Scheduler, "add_request", add)
    monkeypatch.setattr(Scheduler, "has_unfinished_requests", lambda self: bool(held))
    monkeypatch.setattr(scheduler.time, "sleep", lambda seconds: events.extend(["gap", seconds]))
    burst = object.__new__(scheduler.BurstScheduler)
    burst.add_request("a")
    burst.add_request("b")
    held.clear()
    burst.add_request("c")
    gap = ["gap", scheduler._BURST_GAP_S]
    assert events == ["a", *gap, "b", "c", *gap]
    assert 0 < scheduler._BURST_GAP_S < 0.02
