"""Nobody is given what an engine samples before its probe is answered, and sound."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime_like.config import DataConfig, ModelConfig, RolloutConfig, RunConfig
from slime_like.errors import EngineError, WeightSyncError
from slime_like.orchestration import rollout_manager
from slime_like.orchestration.mailbox import Answer
from slime_like.orchestration.rollout_manager import RolloutManager
from slime_like.orchestration.verdict import Verdict
from slime_like.weights.probe_gap import ProbeGap

WANTED = np.array([-1.0, -2.0, -3.0])


def verdict(served: Callable[[], np.ndarray], engine: str = "engine 0 (vllm)") -> Verdict:
    return Verdict(
        3, engine, served, lambda: WANTED, lambda got, wanted: ProbeGap.between(got, wanted, "float32", None)
    )


def test_a_sound_one_is_computed_once_whoever_asks() -> None:
    calls = []
    found: list[float] = []
    own = verdict(lambda: (calls.append(1), WANTED + 5e-5)[1])
    threads = [threading.Thread(target=lambda: found.append(own.settle())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert found == [pytest.approx(5e-5)] * 4 and calls == [1]


@pytest.mark.parametrize("wrong", [0.01, np.nan])
def test_an_unsound_one_stays_so(wrong: float) -> None:
    own = verdict(lambda: WANTED + np.array([0.0, wrong, 0.0]))
    for _ in range(2):
        with pytest.raises(
            WeightSyncError, match=r"to version 3: engine 0 \(vllm\)'s logprobs differ from the trainer's"
        ):
            own.settle()


class Pool(RolloutManager):
    """Of two engines that are played; their answers are there."""

    alive: dict[int, bool]

    @classmethod
    def opened(cls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pool:
        rollout = RolloutConfig(num_engines=2, max_engine_restarts=1)
        config = RunConfig(run_dir=tmp_path, model=ModelConfig(path=tmp_path), data=DataConfig(), rollout=rollout)
        placement: Any = None
        pool = cls(config, placement)
        pool._engines = [0, 1]
        pool.alive = {0: True, 1: True}
        monkeypatch.setattr(rollout_manager, "_is_alive", lambda actor: pool.alive[actor])
        monkeypatch.setattr(rollout_manager, "one", lambda reference, *_, **__: reference)
        for index in (0, 1):
            pool._join(index)
        return pool


ANSWERS = [Answer("a")]


def never() -> np.ndarray:
    raise EngineError("engine 1 (vllm) died while answering the weight-sync probe")


def test_answers_wait_for_the_engines_own_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, asked = Pool.opened(tmp_path, monkeypatch), threading.Event()
    told: list[list[Answer]] = []
    pool.expect([verdict(lambda: (asked.wait(10), WANTED)[1]), verdict(lambda: WANTED)])
    waiting = threading.Thread(target=lambda: told.append(pool.answers(0, ANSWERS)))
    waiting.start()
    assert pool.answers(1, ANSWERS) == ANSWERS and told == []
    asked.set()
    waiting.join(10)
    assert told == [ANSWERS] and pool.settle() == 0.0


def test_what_a_wrong_engine_sampled_is_given_to_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool.opened(tmp_path, monkeypatch)
    pool.expect([verdict(lambda: WANTED + 1), verdict(lambda: WANTED)])
    for _ in range(2):
        with pytest.raises(WeightSyncError, match="does not serve the weights it received"):
            pool.answers(0, ANSWERS)
    assert pool.answers(1, ANSWERS) == ANSWERS
    with pytest.raises(WeightSyncError, match="does not serve the weights it received"):
        pool.settle()


def test_an_engine_that_died_before_its_verdict_leaves_the_pool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Pool.opened(tmp_path, monkeypatch)
    pool.expect([verdict(lambda: WANTED), verdict(never)])
    pool.alive[1] = False
    with pytest.raises(EngineError, match="died while answering"):
        pool.answers(1, ANSWERS)  # a flight asks then whether it lives
    assert pool.settle() == 0.0
    assert {pool.acquire(10) for _ in range(5)} == {0}
    assert pool.settle() == 0.0


def test_an_engine_that_lives_and_has_no_answer_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool.opened(tmp_path, monkeypatch)
    pool.expect([verdict(lambda: WANTED), verdict(never)])
    with pytest.raises(EngineError, match="died while answering"):
        pool.settle()
