"""Calls of all ranks: arguments, the order of waiting, and when a failure is raised."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from slime_like.orchestration.trainer import model_ranks as model_ranks_module
from slime_like.orchestration.trainer import rank as rank_module
from slime_like.orchestration.trainer.model_ranks import ModelRanks, present
from slime_like.orchestration.trainer.rank import TrainerRank
from tests.support.rejections import Rejects

OUT_OF_MEMORY = TrainerError("out of memory")


@dataclass(eq=False)
class Reference:
    """Reference to an answer: the value or the error of a call."""

    value: Any


class Actor:
    """Stand-in for an actor's handle: every method is answered by one function."""

    def __init__(self, answer: Callable[..., Any]) -> None:
        self.answer = answer

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=lambda *arguments: Reference(self.answer(method, *arguments)))


class Cluster:
    """Stand-in for Ray."""

    def __init__(self) -> None:
        self.phases: list[tuple[str, float]] = []
        self.running: list[Any] = []

    def put(self, value: Any) -> Any:
        return ("stored", value)

    def wait(self, references: Sequence[Any], num_returns: int, timeout: float) -> tuple[list[Any], list[Any]]:
        if timeout:
            return list(references[:1]), []
        assert num_returns == len(references)
        running = [reference for reference in references if reference.value in self.running]
        return [reference for reference in references if reference not in running], running

    def one(self, reference: Any, name: str, *, phase: str, timeout_s: float = 0.0, **_: Any) -> Any:
        if timeout_s:
            self.phases.append((phase, timeout_s))
        if isinstance(reference.value, Exception):
            raise TrainerError(f"{name}: {reference.value}")
        return reference.value


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    cluster = Cluster()
    for module in (model_ranks_module, ray_calls):
        monkeypatch.setattr(module, "ray", cluster)
    monkeypatch.setattr(ray_calls, "fetch", cluster.one)
    return cluster


def ranks(answers: Sequence[Callable[..., Any]]) -> ModelRanks:
    """Two tensor-parallel ranks per data-parallel replica."""
    model = ModelRanks(RunConfig(run_dir=Path("run"), model=cast(Any, {"path": "model"})), cast(Any, None))
    model.actors, model.names = [Actor(answer) for answer in answers], [f"rank {rank}" for rank in range(len(answers))]
    model._replicas, model.timeout_s = [rank // 2 for rank in range(len(answers))], 60.0
    return model


def test_each_rank_gets_its_replica_s_element(cluster: Cluster) -> None:
    sent: list[tuple[Any, ...]] = []

    def answer(rank: int) -> Callable[..., Any]:
        def score(*call: Any) -> Any:
            sent.append(call)
            return [f"scores of rank {rank}"] if rank % 2 == 0 else None

        return score

    calls = ranks([answer(rank) for rank in range(4)])
    assert calls.num_replicas == 2
    answers = calls.scatter("scoring", TrainerRank.score, ["first", "second"], "more").result()
    assert cast(Any, present(answers)) == [["scores of rank 0"], ["scores of rank 2"]]
    elements = ["first", "first", "second", "second"]
    assert sent == [("score", ("stored", element), "more") for element in elements]
    assert cluster.phases == [("scoring", 60.0)] * 4


def test_deferred_calls_are_waited_for_first_and_in_order(cluster: Cluster) -> None:
    calls = ranks([lambda method, *rest: method] * 2)
    calls.defer(calls.start("starting", TrainerRank.begin_stream))
    assert calls.is_idle()
    cluster.running = ["train_window"]
    for last in (False, True):
        calls.defer(calls.scatter("training", TrainerRank.train_window, [[]], last))
        assert not calls.is_idle() and cluster.phases == []
    assert calls.start("updating", TrainerRank.finish_stream, 1.0).result(5.0)
    assert cluster.phases == [("training", 5.0)] * 4 + [("updating", 5.0)] * 2


def test_a_failure_of_a_deferred_call_is_raised_once(cluster: Cluster, rejects: Rejects) -> None:
    def answer(method: str, *rest: Any) -> Any:
        return OUT_OF_MEMORY if method == "train_window" else None

    calls = ranks([lambda *rest: None, answer])
    calls.defer(calls.scatter("training", TrainerRank.train_window, [[]], False))
    with rejects(TrainerError, "trainer"):
        calls.is_idle()
    calls.call("receiving returns", TrainerRank.set_tokens, "returns", {})  # a failing run may commit a finished save
    calls.defer(calls.scatter("training", TrainerRank.train_window, [[]], True))
    with rejects(TrainerError, "trainer"):
        calls.call("updating", TrainerRank.finish_stream, 1.0)
    assert cluster.phases[-1][0] == "training"


def test_a_rank_has_the_methods_that_are_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("use_log", "require_own_devices", "use_cluster_interface"):
        monkeypatch.setattr(rank_module, name, lambda *_, **__: None)
    backend = Mock(TrainerBackend)
    backend.setup.return_value = RankCoordinates(0, 0, 0, 0, 0, 1)
    monkeypatch.setattr(rank_module, "load_backend", lambda name: lambda config, placement: backend)
    monkeypatch.setattr(TrainerRank, "device", lambda self: "")
    rank = TrainerRank(RunConfig(run_dir=tmp_path, model=cast(Any, {"path": tmp_path})), "trainer-3")
    rank.shutdown()  # before its setup
    assert rank.peak_memory_bytes()["rss"] > 0
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "max_memory_allocated", lambda: 5)
        assert rank.peak_memory_bytes()["gpu"] == 5
    rank.setup(cast(Any, None), only_scores=False, checkpoint=None)
    for method in ("save", "start_save", "load", "save_weights", "export_hf", "perturb_adapter", "offload"):
        getattr(rank, method)(tmp_path)
        getattr(backend, method).assert_called_once_with(tmp_path)
    assert rank.is_written() is backend.start_save.return_value.is_written.return_value
    rank.load_batch([])
    backend.export_weights.return_value = WeightExport(None, iter([]))
    rank.begin_export()
    assert rank.next_bucket() is None
    rank.shutdown()
    backend.shutdown.assert_called_once_with()
