"""Ranks that share a node's cores."""

from pathlib import Path

from slime_like.config import RunConfig
from slime_like.orchestration.cluster.placement import Placement


def test_ranks_are_counted_by_node(tmp_path: Path) -> None:
    """Six ranks on two nodes, an engine, and two reference workers of two ranks, one of which is on a third node."""
    config = RunConfig(
        run_dir=tmp_path,
        model={"path": tmp_path},
        trainer={"parallel": {"data": 6}},
        algorithm={"kl_coef": 0.1},
        reference={"placement": "workers", "workers": 2, "parallel": {"tensor": 2}},
    )
    placement = Placement(config)
    placement._nodes = [*"aabaaa", "b", *"bb", *"bc"]
    placement._order = [0, 1, 3, 4, 5, 2, *range(6, 11)]  # ranks in the order of nodes
    assert [placement.ranks_on_node(rank) for rank in range(6)] == [5, 5, 5, 5, 5, 1]
    ranks = [placement.ranks_on_node(rank, worker) for worker in range(2) for rank in range(2)]
    assert ranks == [3, 3, 3, 1]
    assert placement.num_nodes == 3
