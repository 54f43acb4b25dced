"""Placement of trainer ranks and engines: one Ray placement group over the cluster, with bundles in node order."""

import ipaddress
import itertools
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any, Self

import ray
import ray._private.state
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slime_like.config import RunConfig
from slime_like.errors import SlimeLikeError
from slime_like.orchestration.cluster.bundles import (
    RANK_LABEL,
    NoRoomError,
    along_devices,
    assign_nodes,
    engine_parts,
    pieces_of,
)
from slime_like.system.interrupts import raise_if_interrupted
from slime_like.system.words import pluralize

_LOOK_EVERY_S = 0.5
_PIN = 0.001
"""Amount of a node's own resource (node:ADDRESS, 1.0 per node) that pins a bundle to the node."""


class Placement:
    """Context manager that reserves devices inside.

    A device is a GPU if the cluster has any, otherwise a CPU slot. Ranks are numbered along nodes, and along devices
    within a node. A tensor-parallel group is always on one node, and so are the ranks that share devices with a
    colocated engine, unless it has more devices than a node. Nodes are in the order given at the cluster's start, or
    else in address order.

    Attributes:
        workers: role of each worker, and of ranks on their own devices.
        engine_nodes: nodes of each engine.
    """

    def __init__(self, config: RunConfig, with_trainers: bool = True, with_engines: bool = True) -> None:
        self._config = config
        self.workers = config.roles.placed
        self._pieces = pieces_of(config, with_trainers, with_engines)
        self.engine_nodes, self._part = engine_parts(config.rollout, config.cluster)
        self._sizes = self._pieces.bundles
        self._num_ranks = sum(self._pieces.ranks)
        self._shared = with_trainers and with_engines and config.cluster.placement == "colocated"
        self._group: PlacementGroup | None = None
        self._order: list[int] = []
        self._nodes: list[str] = []  # node of every bundle

    def __enter__(self) -> Self:
        self._require_enough()
        device = self.device
        deadline = time.monotonic() + self._config.trainer.start_timeout_s
        wanted = self._await_room(deadline)
        self._group = placement_group(
            [{device: size, f"node:{node}": _PIN} for size, node in zip(self._sizes, wanted, strict=True)],
            strategy="PACK",
        )
        try:
            ray.get(self._group.ready(), timeout=max(0.0, deadline - time.monotonic()))
        except GetTimeoutError as error:
            remove_placement_group(self._group)
            raise self._busy_error() from error
        self._order = self._order_by_device(wanted)
        self._nodes = wanted
        return self

    def __exit__(self, *_: object) -> None:
        if self._group is not None and ray.is_initialized():
            remove_placement_group(self._group)

    @property
    def device(self) -> str:
        """Name of Ray's resource for ranks and engines: "GPU" or "CPU"."""
        return "GPU" if ray.cluster_resources().get("GPU", 0) > 0 else "CPU"

    @property
    def num_nodes(self) -> int:
        """Number of nodes in use."""
        return len(set(self._nodes))

    def ranks_on_node(self, rank: int, worker: int | None = None) -> int:
        """Count the trainer ranks on the node of ``rank``; for a worker's rank, all workers' ranks there."""
        bundle, group = self._order[rank], self._order[: self._num_ranks]
        if worker is not None:
            bundle, group = self._worker_bundle(worker, rank), self._order[self._first_worker :]
        return sum(self._nodes[other] == self._nodes[bundle] for other in group)

    def ranks_beside_engine(self, engine: int, part: int = 0) -> int:
        """Count ranks that compute beside a part of an engine: those of all engines, with staleness also of trainers.

        Trainers of streamed steps compute next to engines only for a part of a step.
        """
        config, node = self._config, self._nodes[self._engine_bundle(engine, part)]
        parts = itertools.product(range(config.rollout.num_engines), range(self.engine_nodes))
        ranks = sum(self._part for other in parts if self._nodes[self._engine_bundle(*other)] == node)
        if not config.rollout.max_staleness:
            return ranks
        return ranks + sum(self._nodes[bundle] == node for bundle in self._order[: self._num_ranks])

    def rank_options(self, rank: int, worker: int | None = None, gpus: int = 1) -> dict[str, Any]:
        """Return the Ray options of the actor of a trainer rank, or of a worker's rank. A rank with ``gpus`` 0 shares
        another rank's GPU."""
        return self._in_bundle(self._order[rank] if worker is None else self._worker_bundle(worker, rank), gpus)

    def engine_options(self, engine: int, part: int = 0) -> dict[str, Any]:
        """Return the Ray options of an engine's actor on one of its nodes. A colocated engine owns no device: the
        caller names those of ``shared_ranks``."""
        return self._in_bundle(self._engine_bundle(engine, part), gpus=0 if self._shared else self._part)

    def _engine_bundle(self, engine: int, part: int) -> int:
        separate = self._num_ranks + engine * self.engine_nodes + part
        return self._order[self.shared_ranks(engine, part).start if self._shared else separate]

    @property
    def _first_worker(self) -> int:
        return len(self._sizes) - sum(self._pieces.workers)

    def _worker_bundle(self, worker: int, rank: int) -> int:
        earlier = sum(role.parallel.world_size for role in self.workers[:worker])
        return self._order[self._first_worker + earlier + rank]

    def shared_ranks(self, engine: int, part: int = 0) -> range:
        """Return the trainer ranks whose devices a colocated engine uses on one of its nodes."""
        first = engine * self._config.rollout.ranks + part * self._part
        return range(first, first + self._part)

    def _in_bundle(self, bundle: int, gpus: int) -> dict[str, Any]:
        return {
            # CPU ranks share the cores. The bundle itself is the reservation.
            "num_cpus": 0,
            "num_gpus": gpus if self.device == "GPU" else 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=self._group, placement_group_bundle_index=bundle
            ),
        }

    def _require_enough(self) -> None:
        there, needed = int(ray.cluster_resources().get(self.device, 0)), sum(self._sizes)
        if there < needed:
            lower = "lower trainer.parallel or rollout.num_engines, or share devices with cluster.placement=colocated"
            raise SlimeLikeError(
                f"needs {pluralize(needed, self.device)} ({pluralize(self._num_ranks, 'trainer rank')}, "
                f"{self._bundles}), has {there}",
                code="too-few-devices",
                who="cluster",
                remedy="add nodes, " + (lower if len(self._sizes) > self._num_ranks else "or lower trainer.parallel"),
            )

    @property
    def _bundles(self) -> str:
        return "bundles of " + ", ".join(f"{count} x {size}" for size, count in Counter(self._sizes).items())

    def _await_room(self, deadline: float) -> list[str]:
        """Wait for room for all bundles, and return the address of each bundle's node."""
        while True:
            rooms = node_rooms(self.device)
            try:
                return [list(rooms)[place] for place in assign_nodes(self._pieces, list(rooms.values()))]
            except NoRoomError as error:
                raise_if_interrupted()
                if time.monotonic() > deadline:
                    raise self._busy_error() from error
                largest = max(int(node["Resources"].get(self.device, 0)) for node in ray.nodes() if node["Alive"])
                if error.size > largest:
                    trainer, rollout = self._config.trainer, self._config.rollout
                    raise SlimeLikeError(
                        f"{error.size} {self.device}s are needed on one node "
                        f"(trainer.parallel.tensor={trainer.parallel.tensor}, rollout.tensor={rollout.tensor}, "
                        f"rollout.pipeline={rollout.pipeline}, "
                        f"cluster.gpus_per_node={self._config.cluster.gpus_per_node}), "
                        f"and no node has more than {largest}",
                        code="node-too-small",
                        who="cluster",
                        remedy="use sizes that one node holds",
                    ) from error
            time.sleep(_LOOK_EVERY_S)

    def _busy_error(self) -> SlimeLikeError:
        rooms = ", ".join(f"{address}: {free}" for address, free in node_rooms(self.device).items())
        return SlimeLikeError(
            f"{self._bundles} {self.device} were not free together within "
            f"trainer.start_timeout_s={self._config.trainer.start_timeout_s:g} s, tensor-parallel "
            f"groups whole ({self.device}s free on {rooms})",
            code="devices-busy",
            who="cluster",
            remedy="end what else runs on the cluster, or lower the layout",
        )

    def _order_by_device(self, wanted: Sequence[str]) -> list[int]:
        """Return bundles of trainer ranks sorted by device within each node, then engine bundles unchanged.

        A task inside each bundle reports the bundle's device.
        """
        ranks = list(range(self._num_ranks))
        if self.device == "GPU":
            options = [self._in_bundle(bundle, gpus=1) for bundle in ranks]
            asked = [ray.remote(_own_device).options(**actor_options).remote() for actor_options in options]
            devices = ray.get(asked, timeout=self._config.trainer.start_timeout_s)
            ranks = along_devices(wanted[: self._num_ranks], devices)
        return ranks + list(range(self._num_ranks, len(self._sizes)))


def node_rooms(device: str) -> dict[str, int]:
    """Return the free devices of all living nodes by address, in node order."""
    # `ray.available_resources` sums over all nodes, and `ray.util.state` needs a server that runs don't start.
    free = ray._private.state.available_resources_per_node()
    nodes = sorted((node for node in ray.nodes() if node["Alive"]), key=_position)
    return {node["NodeManagerAddress"]: int(free.get(node["NodeID"], {}).get(device, 0)) for node in nodes}


def _position(node: dict[str, Any]) -> tuple[int, int, str]:
    rank = node.get("Labels", {}).get(RANK_LABEL, "")
    return int(rank or 0), int(ipaddress.ip_address(node["NodeManagerAddress"])), node["NodeID"]


def _own_device() -> int:
    """Return the device assigned to the calling task, in the node's own numbering."""
    name = ray.get_runtime_context().get_accelerator_ids()["GPU"][0]
    return int(name) if name.isdecimal() else 0  # an identifier has no order
