"""Ranks that share a node's cores, and ranks that share devices with engines."""

from pathlib import Path
from typing import Any

import pytest

from slime_like.config import RunConfig
from slime_like.orchestration.cluster.placement import Placement
from slime_like.weights.transports.colocated import rank_on
from tests.unit.weights.test_reach import gpus


def test_ranks_are_counted_by_node(tmp_path: Path) -> None:
    """Six ranks on two nodes, an engine, and two reference workers of two ranks, with one rank on a third node."""
    config = RunConfig(
        run_dir=tmp_path,
        model={"path": tmp_path},
        trainer={"parallel": {"data": 6}},
        algorithm={"kl": {"coef": 0.1}},
        reference={"placement": "workers", "workers": 2, "parallel": {"tensor": 2}},
    )
    placement = Placement(config)
    placement._nodes = [*"aabaaa", "b", *"bb", *"bc"]
    placement._order = [0, 1, 3, 4, 5, 2, *range(6, 11)]  # ranks in the order of nodes
    assert [placement.ranks_on_node(rank) for rank in range(6)] == [5, 5, 5, 5, 5, 1]
    ranks = [placement.ranks_on_node(rank, worker) for worker in range(2) for rank in range(2)]
    assert ranks == [3, 3, 3, 1]
    assert placement.num_nodes == 3


@pytest.mark.parametrize(
    ("rollout", "cluster", "expected"),
    [
        ({}, "separate", [6, 6, 6, 2]),  # engines and trainers take turns
        ({"max_staleness": 1}, "separate", [9, 9, 9, 3]),
        ({"stream": True}, "separate", [6, 6, 6, 2]),
        ({"num_engines": 2}, "colocated", [4, 4]),
    ],
)
def test_ranks_that_compute_next_to_an_engine(
    tmp_path: Path, rollout: dict[str, Any], cluster: str, expected: list[int]
) -> None:
    """Four ranks and four engines of two ranks, on two nodes."""
    config = RunConfig(
        run_dir=tmp_path,
        model={"path": tmp_path},
        trainer={"parallel": {"data": 4}},
        rollout={"num_engines": 4, "tensor": 2, **rollout},
        cluster={"placement": cluster},
        algorithm={"importance": {"correction": "truncate"}},
    )
    placement = Placement(config)
    placement._nodes = [*"aaaa"] if cluster == "colocated" else [*"aaab", *"aaab"]
    placement._order = list(range(len(placement._nodes)))
    assert [placement.ranks_beside_engine(engine) for engine in range(len(expected))] == expected


def test_engines_that_span_nodes(tmp_path: Path) -> None:
    """Two engines of 2 x 2 ranks on nodes of two devices, on separate devices and on those of trainer ranks."""
    sections: dict[str, Any] = {"rollout": {"num_engines": 2, "tensor": 2, "pipeline": 2}, "trainer": {}}
    sections["trainer"]["parallel"] = {"tensor": 2, "data": 4}
    nodes = {"separate": [*"aabbccdd", *"efgh"], "colocated": [*"aabbccdd"]}
    expected = {"separate": [["e", "f"], ["g", "h"]], "colocated": [["a", "b"], ["c", "d"]]}
    for shared, there in nodes.items():
        cluster: dict[str, Any] = {"gpus_per_node": 2, "placement": shared}
        placement = Placement(RunConfig(run_dir=tmp_path, model={"path": tmp_path}, cluster=cluster, **sections))
        placement._nodes, placement._order = there, list(range(len(there)))
        parts = [[placement._engine_bundle(engine, part) for part in range(2)] for engine in range(2)]
        assert placement.engine_nodes == 2
        assert [[there[bundle] for bundle in engine] for engine in parts] == expected[shared]
        assert {placement.ranks_beside_engine(engine, part) for engine in range(2) for part in range(2)} == {2}
    assert [[*placement.shared_ranks(1, part)] for part in range(2)] == [[4, 5], [6, 7]]


def test_engines_of_tensor_4_on_the_devices_of_tensor_8_pipeline_2_context_2() -> None:
    """32 ranks on four nodes and 8 engines. Each engine worker is paired with the rank on its GPU."""
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
        assert [rank_on(device, ranks) for device in devices] == list(range(4 * engine, 4 * engine + 4))
        # CUDA may number a process's devices in another order.
        assert [rank_on(device, ranks) for device in devices[::-1]] == [4 * engine + 3 - worker for worker in range(4)]
        assert len({place.node for place in devices}) == 1
        taken += [rank_on(device, ranks) for device in devices]
    assert sorted(taken) == list(range(32))
