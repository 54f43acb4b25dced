"""Devices that a run reserves, and the node of every rank and engine."""

from pathlib import Path
from typing import Any

import pytest

from slime_like.config import RunConfig
from slime_like.orchestration.cluster.bundles import (
    NoRoomError,
    Pieces,
    along_devices,
    assign_nodes,
    fits_on_nodes,
    pieces_of,
)

REFERENCES = {"placement": "workers", "workers": 2, "parallel": {"tensor": 2}}


def config(tmp_path: Path, **sections: Any) -> RunConfig:
    return RunConfig(run_dir=tmp_path / "run", model={"path": tmp_path}, **sections)


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, [1, 1]),
        ({"trainer": {"parallel": {"data": 2}}, "rollout": {"num_engines": 2, "tensor": 4}}, [1, 1, 4, 4]),
        ({"trainer": {"parallel": {"tensor": 4}}, "cluster": {"placement": "colocated"}}, [1, 1, 1, 1]),
        ({"rollout": {"num_engines": 2, "tensor": 4, "pipeline": 4}}, [1, 8, 8, 8, 8]),  # an engine per two nodes
        ({"rollout": {"tensor": 4, "pipeline": 3}}, [1, 6, 6]),
        ({"rollout": {"tensor": 16}, "cluster": {"gpus_per_node": 4}}, [1, 4, 4, 4, 4]),
        ({"trainer": {"parallel": {"data": 2}}, "algorithm": {"loss": "sft"}}, [1, 1]),
        ({"debug": {"load_rollouts": "rollouts"}}, [1]),
        ({"reference": REFERENCES, "algorithm": {"kl": {"coef": 0.1}}, "rollout": {"tensor": 2}}, [1, 2, 1, 1, 1, 1]),
    ],
)
def test_bundles(tmp_path: Path, sections: dict[str, Any], expected: list[int]) -> None:
    assert pieces_of(config(tmp_path, **sections)).bundles == expected


@pytest.mark.parametrize(
    ("parallel", "rollout", "placement", "expected"),
    [
        ({"tensor": 4, "pipeline": 2}, {"tensor": 2}, "separate", [4, 4]),
        ({"tensor": 2, "pipeline": 4}, {"tensor": 4}, "colocated", [4, 4]),  # an engine spans two groups
        ({"tensor": 4, "pipeline": 2}, {"tensor": 2}, "colocated", [4, 4]),
        ({"tensor": 2, "data": 3}, {"tensor": 4}, "colocated", [4, 2]),
        ({"tensor": 8, "data": 4}, {"tensor": 16}, "colocated", [8, 8, 8, 8]),  # an engine's halves may be apart
        ({"tensor": 2, "data": 6}, {"tensor": 3, "pipeline": 4}, "colocated", [6, 6]),
        ({"data": 3}, {}, "separate", [1, 1, 1]),
    ],
)
def test_ranks_that_must_share_a_node(
    tmp_path: Path, parallel: dict[str, int], rollout: dict[str, int], placement: str, expected: list[int]
) -> None:
    sections: dict[str, Any] = {"trainer": {"parallel": parallel}, "rollout": rollout}
    assert pieces_of(config(tmp_path, **sections, cluster={"placement": placement})).ranks == expected


@pytest.mark.parametrize(
    ("pieces", "free", "expected"),
    [
        (Pieces([8] * 4, []), [8] * 4, [0] * 8 + [1] * 8 + [2] * 8 + [3] * 8),
        (Pieces([2] * 4, [1]), [5, 4], [0] * 4 + [1] * 4 + [0]),  # the engine fits where no group of two does
        (Pieces([4, 4], [2, 2]), [8, 3, 2], [0] * 8 + [1, 2]),
        (Pieces([4, 4], []), [3, 4, 7], [1] * 4 + [2] * 4),  # a node that is partly taken
        (Pieces([1, 1, 1], [4]), [2, 8], [0, 0, 1, 1]),
        # a group of four reference ranks does not start in the rest of the first node
        (Pieces([4], [2], workers=[4, 4, 2]), [8, 8, 4], [0] * 4 + [0] + [1] * 8 + [0] * 2),
    ],
)
def test_nodes_are_filled_in_order(pieces: Pieces, free: list[int], expected: list[int]) -> None:
    assert assign_nodes(pieces, free) == expected


def test_whether_a_run_fits_on_nodes(tmp_path: Path) -> None:
    """Six ranks, an engine, and a reference worker, of one rank and then of four ranks on one node."""
    sections: dict[str, Any] = {"trainer": {"parallel": {"tensor": 3, "data": 2}}, "algorithm": {"kl": {"coef": 0.1}}}
    run = config(tmp_path, **sections, reference={"placement": "workers"})
    pieces = pieces_of(run)
    assert pieces.workers == [1] and fits_on_nodes(pieces, [6, 2]) and not fits_on_nodes(pieces, [6, 1])
    parallel = run.reference.model_copy(update={"parallel": run.reference.parallel.model_copy(update={"tensor": 4})})
    larger = pieces_of(run.model_copy(update={"reference": parallel}))
    assert larger.workers == [4] and fits_on_nodes(larger, [6, 5])
    assert not fits_on_nodes(larger, [6, 1, 3]) and not fits_on_nodes(larger, [8, 3])


@pytest.mark.parametrize(("blocks", "engines", "size"), [([4, 4], [], 4), ([2], [8], 8), ([16], [], 16)])
def test_a_piece_that_fits_on_no_node_is_named(blocks: list[int], engines: list[int], size: int) -> None:
    """Seven devices on two nodes hold one group of four, not two."""
    with pytest.raises(NoRoomError) as error:
        assign_nodes(Pieces(blocks, engines), [4, 3])
    assert error.value.size == size


def test_ranks_follow_nodes_then_devices() -> None:
    """Nodes in the order they are filled, and devices in numerical order."""
    nodes = ["10.0.0.9", "10.0.0.9", "10.0.0.9", "10.0.0.10", "10.0.0.10"]
    assert along_devices(nodes, [10, 2, 0, 1, 0]) == [2, 1, 0, 4, 3]
