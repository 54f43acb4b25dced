"""Calls of all ranks: who is given what, in which order answers are waited for, and when a failure is raised.

At a rank, they reach its parts by the class that a method is of.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch

from slime_like.config import RunConfig
from slime_like.errors import TrainerError
from slime_like.interfaces import RankCoordinates, ScoredLogprobs, TrainerBackend
from slime_like.orchestration.trainer import calls as module
from slime_like.orchestration.trainer.calls import RankCalls
from slime_like.orchestration.trainer.group_training import GroupTraining
from slime_like.orchestration.trainer.rank import TrainerRank
from slime_like.orchestration.trainer.rank_export import RankExport
from slime_like.orchestration.trainer.rank_training import RankTraining
from tests.support.rejections import Rejects

OUT_OF_MEMORY = TrainerError("out of memory")


class Cluster:
    """Ray as the calls see it: an object reference is a list with the value, or the error, of its task."""

    def __init__(self) -> None:
        self.titles: list[str] = []
        self.phases: list[tuple[str, float]] = []
        self.running: list[Any] = []

    def actor(self, answer: Callable[..., Any]) -> Any:
        def options(name: str) -> Any:
            self.titles.append(name)
            return SimpleNamespace(remote=lambda *arguments, **options: [answer(*arguments, **options)])

        return SimpleNamespace(call=SimpleNamespace(options=options))

    def put(self, value: Any) -> Any:
        return ("stored", value)

    def wait(self, references: Sequence[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        assert (num_returns, timeout) == (len(references), 0)
        running = [reference for reference in references if reference in self.running]
        return [reference for reference in references if reference not in running], running

    def gather(self, references: Sequence[Any], names: Sequence[str], *, phase: str, timeout_s: float, **_: Any) -> Any:
        self.phases.append((phase, timeout_s))
        return [self.one(reference, name) for reference, name in zip(references, names, strict=True)]

    def one(self, reference: Any, name: str, **_: Any) -> Any:
        if isinstance(reference[0], Exception):
            raise TrainerError(f"{name}: {reference[0]}")
        return reference[0]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster()
    monkeypatch.setattr(module, "ray", cluster)
    monkeypatch.setattr(module, "gather", cluster.gather)
    monkeypatch.setattr(module, "one", cluster.one)
    return cluster


def ranks(cluster: Cluster, answers: Sequence[Callable[..., Any]]) -> RankCalls:
    """Two tensor-parallel ranks per data-parallel replica."""
    calls = RankCalls("trainer", 60.0)
    calls.connect([cluster.actor(answer) for answer in answers])
    calls.place([RankCoordinates(rank % 2, 0, 0, rank // 2, 0, len(answers) // 2) for rank in range(len(answers))])
    return calls


def test_a_replica_is_given_its_packs_and_answers_once(cluster: Cluster) -> None:
    given: list[tuple[Any, ...]] = []

    def answer(rank: int) -> Callable[..., Any]:
        def score(*arguments: Any) -> Any:
            given.append(arguments)
            return [f"scores of rank {rank}"] if rank % 2 == 0 else None

        return score

    training = GroupTraining(ranks(cluster, [answer(rank) for rank in range(4)]))
    assert training.data_parallel_size == 2
    packs = cast(Any, (["first"], ["second"]))
    scores: list[list[ScoredLogprobs]] = training.score(packs, "reference")
    assert cast(Any, scores) == [["scores of rank 0"], ["scores of rank 2"]]
    stored = [("stored", packs[rank // 2]) for rank in range(4)]
    assert given == [("RankTraining.score", packs, "reference") for packs in stored]
    assert cluster.titles == ["TrainerRank.score"] * 4
    assert cluster.phases == [("scoring with the reference weights", 60.0)]


def test_deferred_calls_are_waited_for_first_and_in_order(cluster: Cluster) -> None:
    calls = ranks(cluster, [lambda method, *rest: method] * 2)
    training = GroupTraining(calls)
    training.load_batch([[]])
    training.begin_stream()
    training.send_window([[]])
    cluster.running = [["RankTraining.train_window"]]
    training.send_window([[]], last=True)
    assert cluster.phases == []
    assert calls.start("updating", GroupTraining.finish_stream).result(5.0) == ["GroupTraining.finish_stream"] * 2
    window = ("training on a window", 5.0)
    assert cluster.phases == [window, window, ("updating", 5.0)]  # the answered ones are not waited for again


def test_ranks_are_idle_when_all_have_answered_for_their_windows(cluster: Cluster, rejects: Rejects) -> None:
    training = GroupTraining(ranks(cluster, [lambda method, *rest: method] * 2))
    training.begin_stream()
    training.send_window([[]])
    assert training.is_idle()
    cluster.running = [["RankTraining.train_window"]]
    training.send_window([[]])
    assert not training.is_idle() and cluster.phases == []
    cluster.running = []
    assert training.is_idle()
    failing = GroupTraining(ranks(cluster, [lambda *rest: OUT_OF_MEMORY] * 2))
    failing.send_window([[]])
    with rejects(TrainerError, "trainer"):
        failing.is_idle()


def test_a_failed_window_ends_the_stream(cluster: Cluster, rejects: Rejects) -> None:
    def answer(method: str, *rest: Any) -> Any:
        return OUT_OF_MEMORY if method == "RankTraining.train_window" else None

    training = GroupTraining(ranks(cluster, [lambda *rest: None, answer]))
    training.begin_stream()
    training.send_window([[]])
    with rejects(TrainerError, "trainer"):
        training.send_window([[]])
    training.set_advantages({})  # raised once: a failing run may still commit a checkpoint that is written
    training = GroupTraining(ranks(cluster, [lambda *rest: None, answer]))
    training.send_window([[]], last=True)
    with rejects(TrainerError, "trainer"):
        training.finish_stream(1.0)
    assert cluster.phases[-1][0] == "training on a window"


def test_a_call_reaches_the_part_that_has_the_method(tmp_path: Path) -> None:
    rank = TrainerRank(RunConfig(run_dir=tmp_path, model=cast(Any, {"path": tmp_path})), 3)
    for method in (TrainerBackend.save, RankTraining.load_batch, RankExport.next_bucket):
        with pytest.raises(RuntimeError, match="trainer rank 3 is used before setup"):
            rank.call(method.__qualname__, tmp_path)
    assert rank.call(TrainerRank.peak_memory_bytes.__qualname__)["rss"] > 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "max_memory_allocated", lambda: 5)
        assert rank.call(TrainerRank.peak_memory_bytes.__qualname__)["gpu"] == 5
    backend = Mock(TrainerBackend)
    rank._parts[TrainerBackend.__name__] = backend
    rank._open_parts(backend, RankCoordinates(0, 0, 0, 0, 0, 1))
    rank.call(TrainerBackend.save.__qualname__, tmp_path)
    backend.save.assert_called_once_with(tmp_path)
    rank.call(RankTraining.load_batch.__qualname__, [])
    with pytest.raises(RuntimeError, match="a bucket is asked for before begin_export"):
        rank.call(RankExport.next_bucket.__qualname__)
    rank.call(TrainerRank.shutdown.__qualname__)
    backend.shutdown.assert_called_once_with()
