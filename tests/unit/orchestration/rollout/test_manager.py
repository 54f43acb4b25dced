"""Requests on the engines that serve, without Ray."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from slime_like.config import RunConfig
from slime_like.errors import EngineError
from slime_like.interfaces import Generation, GenerationRequest, SamplingParams
from slime_like.orchestration.rollout import manager as manager_module
from slime_like.orchestration.rollout.engine_client import Answer, NoEngineLeft
from slime_like.orchestration.rollout.manager import RolloutManager
from tests.support.rejections import Rejects
from tests.unit.checks.checkpoint import write_checkpoint


class Supervisor:
    """Of one engine, whose first ``deaths`` starts die of the first request."""

    last_death = "engine 0 died"

    def __init__(self, deaths: int) -> None:
        self.serving = [0]
        self.engines = SimpleNamespace(wait=lambda references, timeout_s: list(references))
        self._deaths = deaths
        self._sent: list[GenerationRequest] = []

    def name(self, number: int) -> str:
        return f"start {number}"

    def actor(self, number: int) -> Any:
        answers = self._die if number < self._deaths else self._answers
        return SimpleNamespace(
            submit=SimpleNamespace(remote=lambda _, requests: self._submit(requests)),
            answers=SimpleNamespace(remote=lambda _: answers),
        )

    def lose(self, number: int, error: EngineError) -> bool:
        self.serving = []
        return True

    def revive(self) -> None:
        assert not self.serving
        self.serving = [1]

    def _submit(self, requests: Sequence[GenerationRequest]) -> None:
        self._sent = list(requests)

    def _die(self) -> list[Answer]:
        raise EngineError("engine 0 died")

    def _answers(self) -> list[Answer]:
        sampled = Generation(np.array([7]), np.zeros(1, np.float32), np.array([0]), "stop")
        return [Answer(request.request_id, [sampled]) for request in self._sent]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], RolloutManager]:
    write_checkpoint(tmp_path / "model")
    monkeypatch.setattr(manager_module, "one", lambda reference, name, **_: reference())
    config = RunConfig(run_dir=tmp_path, model={"path": tmp_path / "model"}, steps=1)
    return lambda deaths: RolloutManager(config, cast(Any, Supervisor(deaths)))


def requests(count: int) -> list[GenerationRequest]:
    return [GenerationRequest(f"r{index}", [3, 4], SamplingParams()) for index in range(count)]


@pytest.mark.parametrize("deaths", [0, 1])
def test_an_evaluation_whose_only_engine_dies_has_it_replaced(
    make: Callable[[int], RolloutManager], deaths: int
) -> None:
    answers = make(deaths).generate(requests(3))
    assert [[generation.token_ids.tolist() for generation in each] for each in answers] == [[[7]]] * 3


def test_where_no_engine_serves_the_death_is_named(make: Callable[[int], RolloutManager], rejects: Rejects) -> None:
    manager = make(1)
    assert manager.acquire(10) == 0
    manager.lose(0, EngineError("killed"))
    with rejects(NoEngineLeft, "no-engine"):
        manager.acquire(10)
