"""Calls of all ranks: arguments, the order of waiting, and when a failure is raised."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch

from slime_like.config import RunConfig
from slime_like.errors import TrainerError
from slime_like.interfaces import RankCoordinates, TrainerBackend, WeightExport
from slime_like.orchestration.cluster import ray_calls
from slime_like.orchestration.trainer import calls as calls_module
from slime_like.orchestration.trainer import rank as rank_module
from slime_like.orchestration.trainer.calls import RankCalls
from slime_like.orchestration.trainer.rank import TrainerRank
from slime_like.orchestration.trainer.rank_export import RankExport
from slime_like.orchestration.trainer.rank_training import RankTraining
from tests.support.rejections import Rejects

OUT_OF_MEMORY = TrainerError("out of memory")
WINDOW = RankTraining.train_window


class Cluster:
    """Stand-in for Ray. An object reference is a list with the value or the error of its task."""

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
    for module in (calls_module, ray_calls):
        monkeypatch.setattr(module, "ray", cluster)
    monkeypatch.setattr(ray_calls, "gather", cluster.gather)
    monkeypatch.setattr(ray_calls, "one", cluster.one)
    return cluster


def ranks(cluster: Cluster, answers: Sequence[Callable[..., Any]]) -> RankCalls:
    """Two tensor-parallel ranks per data-parallel replica."""
    calls = RankCalls("trainer", 60.0)
    calls.connect([cluster.actor(answer) for answer in answers])
    calls.place([RankCoordinates(rank % 2, 0, 0, rank // 2, 0, len(answers) // 2) for rank in range(len(answers))])
    return calls


def test_each_rank_gets_its_replica_s_element(cluster: Cluster) -> None:
    sent: list[tuple[Any, ...]] = []

    def answer(rank: int) -> Callable[..., Any]:
        def score(*arguments: Any) -> Any:
            sent.append(arguments)
            return [f"scores of rank {rank}"] if rank % 2 == 0 else None

        return score

    calls = ranks(cluster, [answer(rank) for rank in range(4)])
    assert calls.num_replicas == 2
    answers = calls.scatter("scoring", RankTraining.score, ["first", "second"], "more").result()
    assert cast(Any, calls.by_replica(answers)) == [["scores of rank 0"], ["scores of rank 2"]]
    elements = ["first", "first", "second", "second"]
    assert sent == [("RankTraining.score", ("stored", element), "more") for element in elements]
    assert cluster.titles == ["TrainerRank.score"] * 4
    assert cluster.phases == [("scoring", 60.0)]


def test_deferred_calls_are_waited_for_first_and_in_order(cluster: Cluster) -> None:
    calls = ranks(cluster, [lambda method, *rest: method] * 2)
    calls.defer(calls.start("starting", RankTraining.begin_stream))
    assert calls.is_idle()
    cluster.running = [["RankTraining.train_window"]]
    for last in (False, True):
        calls.defer(calls.scatter("training", WINDOW, [[]], last))
        assert not calls.is_idle() and cluster.phases == []
    assert calls.start("updating", RankTraining.finish_stream, 1.0).result(5.0)
    assert cluster.phases == [("training", 5.0), ("training", 5.0), ("updating", 5.0)]


def test_a_failure_of_a_deferred_call_is_raised_once(cluster: Cluster, rejects: Rejects) -> None:
    def answer(method: str, *rest: Any) -> Any:
        return OUT_OF_MEMORY if method == "RankTraining.train_window" else None

    calls = ranks(cluster, [lambda *rest: None, answer])
    calls.defer(calls.scatter("training", WINDOW, [[]], False))
    with rejects(TrainerError, "trainer"):
        calls.is_idle()
    calls.call(
        "receiving advantages", RankTraining.set_tokens, "advantages", {}
    )  # a failing run may commit a finished save
    calls.defer(calls.scatter("training", WINDOW, [[]], True))
    with rejects(TrainerError, "trainer"):
        calls.call("updating", RankTraining.finish_stream, 1.0)
    assert cluster.phases[-1][0] == "training"


def test_a_call_reaches_the_part_that_has_the_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("use_log", "require_own_devices", "use_cluster_interface"):
        monkeypatch.setattr(rank_module, name, lambda *_, **__: None)
    backend = Mock(TrainerBackend)
    backend.setup.return_value = RankCoordinates(0, 0, 0, 0, 0, 1)
    monkeypatch.setattr(rank_module, "load_backend", lambda name: lambda config, placement: backend)
    monkeypatch.setattr(TrainerRank, "device", lambda self: "")
    rank = TrainerRank(RunConfig(run_dir=tmp_path, model=cast(Any, {"path": tmp_path})), "trainer-3")
    assert rank.call(TrainerRank.peak_memory_bytes.__qualname__)["rss"] > 0
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "max_memory_allocated", lambda: 5)
        assert rank.call(TrainerRank.peak_memory_bytes.__qualname__)["gpu"] == 5
    rank.setup(cast(Any, None), only_scores=False, checkpoint=None)
    rank.call(TrainerBackend.save.__qualname__, tmp_path)
    backend.save.assert_called_once_with(tmp_path)
    rank.call(RankTraining.load_batch.__qualname__, [])
    backend.export_weights.return_value = WeightExport(None, iter([]))
    rank.call(RankExport.begin_export.__qualname__)
    assert rank.call(RankExport.next_bucket.__qualname__) is None
    rank.call(TrainerRank.shutdown.__qualname__)
    backend.shutdown.assert_called_once_with()
