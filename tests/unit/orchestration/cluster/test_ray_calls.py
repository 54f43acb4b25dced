"""A wait for several answers, as it is shown. Ray is replaced by a list of references in the order of their answers."""

from types import SimpleNamespace
from typing import Any

import pytest

from slime_like.errors import EngineError
from slime_like.orchestration.cluster import ray_calls


def test_the_names_that_have_not_answered_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(references: list[str], num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        return [sorted(references)[-1]], []  # the last one answers first

    monkeypatch.setattr(ray_calls, "ray", SimpleNamespace(wait=wait, get=lambda reference, timeout: reference.upper()))
    left: list[Any] = []
    answers = ray_calls.gather(
        ["a", "b", "c"], ["one", "two", "three"], phase="starting", timeout_s=9, error=EngineError, left=left.append
    )
    assert answers == ["A", "B", "C"]
    assert left == [["one", "two", "three"], ["one", "two"], ["one"], []]
