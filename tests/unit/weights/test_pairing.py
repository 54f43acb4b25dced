"""Pairing of engine workers with trainer ranks."""

import socket

import pytest

from slime_like.errors import WeightSyncError
from slime_like.weights.transports.colocated import Place, pair
from tests.support.rejections import Rejects


def gpus(nodes: int, per_node: int = 8) -> list[Place]:
    return [Place(f"node-{node}", f"GPU-{node}-{index}") for node in range(nodes) for index in range(per_node)]


def test_ranks_without_a_worker() -> None:
    assert pair(gpus(1), gpus(1)[5:7]) == [5, 6]


def test_unpaired(rejects: Rejects) -> None:
    ranks = gpus(2, 2)
    strangers = [Place("node-0", "GPU-1-0"), ranks[3], Place("node-7", "GPU-7-0")]
    for several, workers in ((ranks, strangers), ([*ranks, ranks[1]], ranks[:1]), ([], ranks[:1])):
        with rejects(WeightSyncError, "unpaired"):
            pair(several, workers)


@pytest.mark.parametrize("slot", [0, 6])
def test_cpu_slot(slot: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert Place.of_this_process(slot) == Place(socket.gethostname(), f"CPU slot {slot}")
