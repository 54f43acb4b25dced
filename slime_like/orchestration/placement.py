"""Where trainer ranks and engines run: one Ray placement group over the cluster, its bundles in the order of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slime_like.config import RunConfig
from slime_like.errors import SlimeLikeError


def bundle_sizes(config: RunConfig, with_trainers: bool = True, with_engines: bool = True) -> list[int]:
    """Devices of every bundle: one for each trainer rank, then ``rollout.tensor`` for each engine of its own devices.

    Colocated engines use the bundles of trainer ranks, so that they add none. Evaluation runs without trainers, scoring
    and verification without engines.
    """
    trainers = [1] * config.trainer.parallel.world_size if with_trainers else []
    if not with_engines or config.supervised or config.debug.load_rollouts:
        return trainers
    colocated = with_trainers and config.cluster.placement == "colocated"
    return trainers + ([] if colocated else [config.rollout.tensor] * config.rollout.num_engines)


class Placement:
    """Context manager: devices are reserved inside and free outside.

    A device is a GPU where the cluster has any, and a CPU slot elsewhere. Ranks are numbered along nodes, so that
    neighbours, above all tensor-parallel ones, share a node.
    """

    def __init__(self, config: RunConfig, with_trainers: bool = True, with_engines: bool = True) -> None:
        self._config = config
        self._sizes = bundle_sizes(config, with_trainers, with_engines)
        self._num_ranks = config.trainer.parallel.world_size if with_trainers else 0
        self._shared = with_trainers and with_engines and config.cluster.placement == "colocated"
        self._group: PlacementGroup | None = None
        self._order: list[int] = []
        self._nodes: list[str] = []

    def __enter__(self) -> Placement:
        self._require_enough()
        device = self.device
        self._group = placement_group([{device: size} for size in self._sizes], strategy="PACK")
        try:
            ray.get(self._group.ready(), timeout=self._config.trainer.start_timeout_s)
        except GetTimeoutError as error:
            remove_placement_group(self._group)
            raise SlimeLikeError(
                f"cluster: bundles of {self._sizes} {device} were not free together within trainer.start_timeout_s="
                f"{self._config.trainer.start_timeout_s:g} s; end what else runs on the cluster, or lower the layout"
            ) from error
        bundle_nodes = placement_group_table(self._group)["bundles_to_node_id"]
        ranks = sorted(range(self._num_ranks), key=lambda bundle: (bundle_nodes[bundle], bundle))
        self._order = ranks + list(range(self._num_ranks, len(self._sizes)))
        self._nodes = [bundle_nodes[bundle] for bundle in self._order]
        self._require_whole_nodes()
        return self

    def __exit__(self, *_: object) -> None:
        if self._group is not None and ray.is_initialized():
            remove_placement_group(self._group)

    @property
    def device(self) -> str:
        """Ray's name of the resource that ranks and engines are given: "GPU" or "CPU"."""
        return "GPU" if ray.cluster_resources().get("GPU", 0) > 0 else "CPU"

    @property
    def num_nodes(self) -> int:
        """Nodes in use."""
        return len(set(self._nodes))

    def trainer_options(self, rank: int) -> dict[str, Any]:
        """Ray options of one trainer rank's actor."""
        return self._options(rank, gpus=1)

    def engine_options(self, engine: int) -> dict[str, Any]:
        """Ray options of one engine's actor. A colocated one owns no device: it is told which to use."""
        if self._shared:
            return self._options(self.shared_ranks(engine).start, gpus=0)
        return self._options(self._num_ranks + engine, gpus=self._config.rollout.tensor)

    def shared_ranks(self, engine: int) -> range:
        """Trainer ranks whose devices a colocated engine uses."""
        tensor = self._config.rollout.tensor
        return range(engine * tensor, (engine + 1) * tensor)

    def _options(self, place: int, gpus: int) -> dict[str, Any]:
        return {
            # CPU ranks share the cores; the reservation is the bundle itself.
            "num_cpus": 0,
            "num_gpus": gpus if self.device == "GPU" else 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=self._order[place]
            ),
        }

    def _require_enough(self) -> None:
        there, needed = int(ray.cluster_resources().get(self.device, 0)), sum(self._sizes)
        if there < needed:
            engines = len(self._sizes) > self._num_ranks
            raise SlimeLikeError(
                f"cluster: {needed} {self.device}s are needed ({self._num_ranks} trainer ranks, bundles of "
                f"{self._sizes}), the cluster has {there}; add nodes, "
                + (
                    "lower trainer.parallel or rollout.num_engines, or share devices with cluster.placement=colocated"
                    if engines
                    else "or lower trainer.parallel"
                )
            )

    def _require_whole_nodes(self) -> None:
        nodes = self._nodes[: self._num_ranks]
        require_whole_nodes("trainer.parallel.tensor", self._config.trainer.parallel.tensor, nodes)
        if self._shared:
            require_whole_nodes("rollout.tensor", self._config.rollout.tensor, nodes)


def require_whole_nodes(field: str, size: int, nodes: Sequence[str]) -> None:
    """Tensor parallelism moves data within every layer: between nodes it is a mistake, not a choice.

    Raises:
        SlimeLikeError: of ``nodes``, one per rank, ``size`` neighbours are not the same.
    """
    for start in range(0, len(nodes) - size + 1, size):
        if len(set(nodes[start : start + size])) > 1:
            raise SlimeLikeError(
                f"cluster: {field}={size}, but ranks {start} to {start + size - 1} lie on several nodes; use a size "
                "that divides the devices of every node"
            )
