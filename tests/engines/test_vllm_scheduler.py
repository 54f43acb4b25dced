"""What vLLM's scheduler on a CPU does besides vLLM's own: it lets a burst of requests arrive."""

from typing import Any

import pytest


def test_only_the_first_request_of_a_burst_waits_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler  # seconds, which every process that collects tests would take

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
