"""Device bundles of a run, and their nodes. Counting them needs neither torch nor Ray."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from slime_like.config import ClusterConfig, RolloutConfig, RunConfig

RANK_LABEL = "slime-like.io/node-rank"
"""Label of Ray nodes with the order in which they are filled."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """A run's devices in pieces. Each piece must be on one node.

    Attributes:
        ranks: sizes of groups of consecutive trainer ranks: a tensor-parallel group, or the ranks of a colocated
            engine on one node, which must not be split either.
        engines: devices of each separate engine by node. Colocated engines use the devices of trainer ranks.
        workers: ranks of the workers of all roles, by tensor-parallel group.
    """

    ranks: Sequence[int]
    engines: Sequence[int] = ()
    workers: Sequence[int] = ()

    @property
    def bundles(self) -> list[int]:
        """Devices per bundle: one for each trainer rank, then each engine's, then one for each worker rank."""
        return [1] * sum(self.ranks) + [*self.engines] + [1] * sum(self.workers)


def pieces_of(config: RunConfig, with_trainers: bool = True, with_engines: bool = True) -> Pieces:
    """Compute a run's pieces. Evaluation has no trainers, scoring and verification have no engines."""
    parallel, (count, part) = config.trainer.parallel, engine_parts(config.rollout, config.cluster)
    colocated = with_trainers and config.cluster.placement == "colocated"
    samples = with_engines and config.starts_engines
    size, ranks = parallel.tensor, parallel.world_size if with_trainers else 0
    layouts = [role.parallel for role in config.roles.placed]
    groups = [layout.tensor for layout in layouts for _ in range(layout.world_size // layout.tensor)]
    if samples and colocated:
        size = min(math.lcm(size, part), ranks)
    return Pieces(
        [min(size, ranks - start) for start in range(0, ranks, size)],
        [part] * count * config.rollout.num_engines if samples and not colocated else (),
        groups if with_engines and with_trainers else (),
    )


def engine_parts(rollout: RolloutConfig, cluster: ClusterConfig) -> tuple[int, int]:
    """Return the number of an engine's nodes, and its devices on each."""
    count = cluster.nodes_for(rollout.ranks)
    return count, rollout.ranks // count


class NoRoomError(Exception):
    """A piece of ``size`` devices that must be on one node fits on no node."""

    def __init__(self, size: int) -> None:
        self.size = size
        super().__init__(f"{size} devices on one node")


def assign_nodes(pieces: Pieces, devices: Sequence[int]) -> list[int]:
    """Return the node index of every bundle, given the free devices of every node.

    Ranks fill nodes in order and never go back, so neighbors stay together and pipeline stages follow the nodes.
    Engines take the first remaining room, then groups of worker ranks do.

    Raises ``NoRoomError`` if a piece fits nowhere.
    """
    free = list(devices)
    places: list[int] = []
    current = 0
    for block in pieces.ranks:
        current = _first_with_room(free, block, start=current)
        free[current] -= block
        places += [current] * block
    for size, bundles in [*((size, 1) for size in pieces.engines), *((size, size) for size in pieces.workers)]:
        node = _first_with_room(free, size, start=0)
        free[node] -= size
        places += [node] * bundles
    return places


def fits_on_nodes(pieces: Pieces, devices: Sequence[int]) -> bool:
    """Return whether a run's pieces fit on empty nodes with these numbers of devices."""
    try:
        assign_nodes(pieces, devices)
    except NoRoomError:
        return False
    return True


def along_devices(nodes: Sequence[str], devices: Sequence[int]) -> list[int]:
    """Sort bundle indices by node, in order of first appearance in ``nodes``, and then by device."""
    first = {node: index for index, node in reversed(list(enumerate(nodes)))}
    return sorted(range(len(nodes)), key=lambda bundle: (first[nodes[bundle]], devices[bundle]))


def _first_with_room(free: Sequence[int], size: int, start: int) -> int:
    for node in range(start, len(free)):
        if free[node] >= size:
            return node
    raise NoRoomError(size)


def slots_per_node(pieces: Pieces, tensor: int, nodes: int) -> int:
    """Return the number of CPU slots that each node without GPUs must offer to spread ranks and engines evenly.

    Groups of ``tensor`` ranks and engines' parts must not be split between nodes. Their sizes must divide a node's
    slots, like they must divide its GPUs.
    """
    sizes = [*pieces.ranks, *pieces.engines, *pieces.workers]
    step = math.lcm(tensor, *pieces.engines, *pieces.workers)
    slots = step * math.ceil(max(sum(sizes) / nodes, *sizes) / step)
    while not fits_on_nodes(pieces, [slots] * nodes):
        slots += step
    return slots
