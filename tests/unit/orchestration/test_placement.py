"""How many devices a run reserves, and how it numbers ranks along nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ray

from slime_like.config import RunConfig
from slime_like.errors import SlimeLikeError
from slime_like.orchestration.cluster.bundles import bundle_sizes
from slime_like.orchestration.cluster.cluster import Cluster
from slime_like.orchestration.cluster.placement import Placement, require_whole_nodes

REFERENCES = {"placement": "workers", "workers": 2, "parallel": {"tensor": 2}}


def config(tmp_path: Path, **sections: Any) -> RunConfig:
    return RunConfig(run_dir=tmp_path / "run", model={"path": tmp_path}, **sections)


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, [1, 1]),
        ({"trainer": {"parallel": {"data": 2}}, "rollout": {"num_engines": 2, "tensor": 4}}, [1, 1, 4, 4]),
        ({"trainer": {"parallel": {"tensor": 4}}, "cluster": {"placement": "colocated"}}, [1, 1, 1, 1]),
        ({"trainer": {"parallel": {"data": 2}}, "algorithm": {"loss": "sft"}}, [1, 1]),
        ({"debug": {"load_rollouts": "rollouts"}}, [1]),
        ({"reference": REFERENCES}, [1, 1]),  # nobody asks the reference
        ({"reference": REFERENCES, "algorithm": {"kl_coef": 0.1}, "rollout": {"tensor": 2}}, [1, 2, 1, 1, 1, 1]),
        ({"reference": REFERENCES, "algorithm": {"kl_coef": 0.1}, "debug": {"load_rollouts": "rollouts"}}, [1]),
    ],
)
def test_bundles(tmp_path: Path, sections: dict[str, Any], expected: list[int]) -> None:
    assert bundle_sizes(config(tmp_path, **sections)) == expected


def test_evaluation_reserves_engines_alone(tmp_path: Path) -> None:
    colocated = config(tmp_path, rollout={"num_engines": 3}, cluster={"placement": "colocated"})
    assert bundle_sizes(colocated, with_trainers=False) == [1, 1, 1]


def test_tensor_parallel_ranks_share_a_node() -> None:
    require_whole_nodes("trainer.parallel.tensor", 2, ["a", "a", "b", "b"])
    with pytest.raises(SlimeLikeError, match=r"trainer\.parallel\.tensor=2, but ranks 2 to 3 lie on several nodes"):
        require_whole_nodes("trainer.parallel.tensor", 2, ["a", "a", "a", "b", "b", "b"])


def test_a_cluster_that_is_too_small_is_refused_at_once(tmp_path: Path) -> None:
    """Reserved, numbered, given back; and what the cluster does not have is named instead of waited for."""
    references = {"placement": "workers", "workers": 2}
    fits = config(tmp_path, trainer={"parallel": {"data": 3}}, reference=references, algorithm={"kl_coef": 0.1})
    larger = config(tmp_path, trainer={"parallel": {"data": 300}})
    fits.run_dir.mkdir()
    with Cluster(fits.cluster, fits.run_dir / "worker_logs", slots=6):
        for _ in range(2):  # the second time needs what the first one gave back
            with Placement(fits) as placement:
                assert placement.device == "CPU" and placement.num_nodes == 1
                strategies = [placement.trainer_options(rank)["scheduling_strategy"] for rank in range(3)]
                strategies.append(placement.engine_options(0)["scheduling_strategy"])
                strategies += [placement.reference_options(i, 0)["scheduling_strategy"] for i in range(2)]
                assert [strategy.placement_group_bundle_index for strategy in strategies] == [0, 1, 2, 3, 4, 5]
        with pytest.raises(SlimeLikeError, match=r"301 CPUs are needed \(300 trainer ranks.* the cluster has 6"):
            Placement(larger).__enter__()
    assert not ray.is_initialized()
