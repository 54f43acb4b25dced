"""Which trainer rank an engine's worker takes weights from."""

import socket

import pytest

from slime_like.config import RunConfig
from slime_like.errors import WeightSyncError
from slime_like.orchestration.cluster.placement import Placement
from slime_like.weights.transports.pairing import Place, pair
from tests.support.rejections import Rejects


def gpus(nodes: int, per_node: int = 8) -> list[Place]:
    return [Place(f"node-{node}", f"GPU-{node}-{index}") for node in range(nodes) for index in range(per_node)]


def test_tensor_8_pipeline_2_context_2_against_engines_of_tensor_4() -> None:
    """32 ranks on four nodes, 8 engines: every GPU's worker has its own rank, as the placement gave devices."""
    raw = {
        "run_dir": "unused",
        "model": {"path": "unused"},
        "trainer": {"parallel": {"tensor": 8, "pipeline": 2, "context": 2}},
        "rollout": {"num_engines": 8, "tensor": 4},
        "cluster": {"placement": "colocated"},
    }
    placement = Placement(RunConfig.model_validate(raw))
    ranks = gpus(4)
    assert len(ranks) == 32
    taken: list[int] = []
    for engine in range(8):
        devices = [ranks[rank] for rank in placement.shared_ranks(engine)]
        assert pair(ranks, devices) == list(range(4 * engine, 4 * engine + 4))
        # CUDA may number a process's devices otherwise: each worker is still at its own GPU's rank.
        assert pair(ranks, devices[::-1]) == [4 * engine + 3 - worker for worker in range(4)]
        assert len({place.node for place in devices}) == 1
        taken += pair(ranks, devices)
    assert sorted(taken) == list(range(32))


def test_ranks_without_a_worker() -> None:
    assert pair(gpus(1), gpus(1)[5:7]) == [5, 6]


def test_the_unpaired_are_named(rejects: Rejects) -> None:
    ranks = gpus(2, 2)
    strangers = [Place("node-0", "GPU-1-0"), ranks[3], Place("node-7", "GPU-7-0")]
    for several, workers in ((ranks, strangers), ([*ranks, ranks[1]], ranks[:1]), ([], ranks[:1])):
        with rejects(WeightSyncError, "unpaired"):
            pair(several, workers)


@pytest.mark.parametrize("slot", [0, 6])
def test_a_slot_of_a_cpu(slot: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert Place.of_this_process(slot) == Place(socket.gethostname(), f"CPU slot {slot}")
