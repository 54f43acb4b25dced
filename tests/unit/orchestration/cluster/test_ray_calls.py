"""Waits for workers: names of those still missing, and failures as one sentence. Ray's answers are faked."""

from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import OutOfMemoryError

from slime_like.errors import EngineError, TrainerError
from slime_like.orchestration.cluster import ray_calls


def test_names_without_an_answer_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(references: list[str], num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        return [sorted(references)[-1]], []  # the last one answers first

    monkeypatch.setattr(ray_calls, "ray", SimpleNamespace(wait=wait, get=lambda reference, timeout: reference.upper()))
    left: list[Any] = []
    asked: ray_calls.Answers[str] = ray_calls.Answers(
        {"one": "a", "two": "b", "three": "c"}, "starting", 9, EngineError
    )
    assert asked.result(on_waiting=left.append) == ["A", "B", "C"]
    assert left == [["one", "two", "three"], ["one", "two"], ["one"], []]


_REPORT = """1 worker(s) were killed due to the node running low on memory.
Memory on the node (IP: 10.0.0.1, ID: 7d5b) was 22.91GB used / 23.54GB limit (0.973), above 0.9."""


def test_a_worker_ended_for_lack_of_memory_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(reference: object, timeout: float) -> None:
        raise OutOfMemoryError(_REPORT)

    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(TrainerError) as caught:
        ray_calls.fetch(object(), "trainer rank 0", phase="saving a checkpoint", error=TrainerError)
    assert caught.value.code == "node-out-of-memory"
    assert "22.91GB of 23.54GB" in caught.value.problem and "7d5b" not in str(caught.value)
    assert "trainer.target_tokens_per_batch" in str(caught.value.remedy)
