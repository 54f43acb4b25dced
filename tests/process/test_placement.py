"""Placement on a real Ray cluster."""

from pathlib import Path

import ray

from slime_like.errors import SlimeLikeError
from slime_like.orchestration.cluster.cluster import Cluster
from slime_like.orchestration.cluster.placement import Placement
from tests.support.rejections import Rejects
from tests.unit.orchestration.cluster.test_bundles import config


def test_a_cluster_that_is_too_small_is_refused_at_once(tmp_path: Path, rejects: Rejects) -> None:
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
        with rejects(SlimeLikeError):
            Placement(larger).__enter__()
    assert not ray.is_initialized()
