"""Bundles of devices of a run, and their nodes. Pure: no Ray."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from slime_like.config import RunConfig

RANK_LABEL = "slime-like.io/node-rank"
"""Label of Ray's nodes: the order in which they are filled."""


def bundle_sizes(config: RunConfig, with_trainers: bool = True, with_engines: bool = True) -> list[int]:
    """Devices of every bundle: one for each trainer rank, then ``rollout.tensor`` for each separate engine,
    then one for each rank of the reference workers.

    Colocated engines use the bundles of trainer ranks, so that they add none. Evaluation runs without trainers, scoring
    and verification without engines; neither has reference workers.
    """
    trainers = [1] * config.trainer.parallel.world_size if with_trainers else []
    if not with_engines or config.supervised or config.debug.load_rollouts:
        return trainers
    colocated = with_trainers and config.cluster.placement == "colocated"
    engines = [] if colocated else [config.rollout.tensor] * config.rollout.num_engines
    return trainers + engines + ([1] * num_reference_ranks(config) if with_trainers else [])


def num_reference_ranks(config: RunConfig) -> int:
    """Number of ranks of all reference workers."""
    return config.reference_workers * config.reference.parallel.world_size


def reference_blocks(config: RunConfig) -> list[int]:
    """Ranks of the reference workers in runs that must share a node: their tensor-parallel groups."""
    size = config.reference.parallel.tensor
    return [size] * (num_reference_ranks(config) // size)


def tensor_blocks(config: RunConfig, with_engines: bool = True) -> list[int]:
    """Trainer ranks in runs of neighbours that must share a node, in rank order.

    A run is a tensor-parallel group, or as many as make up a colocated engine, which must not be divided either.
    """
    size, ranks = config.trainer.parallel.tensor, config.trainer.parallel.world_size
    if with_engines and config.cluster.placement == "colocated" and not config.supervised:
        size = math.lcm(size, config.rollout.tensor)
    size = min(size, ranks)
    return [min(size, ranks - start) for start in range(0, ranks, size)]


@dataclass(slots=True)
class NodeRoom:
    """Free devices of one node."""

    address: str
    free: int


class NoRoomError(Exception):
    """A piece that must lie on one node, of ``size`` devices, fits on none."""

    def __init__(self, size: int) -> None:
        self.size = size
        super().__init__(f"{size} devices on one node")


def assign_nodes(
    blocks: Sequence[int], engines: Sequence[int], nodes: Sequence[NodeRoom], references: Sequence[int] = ()
) -> list[int]:
    """Index of the node of every bundle: all ranks of all blocks, then the engines, then all ranks of ``references``.

    Ranks fill nodes in order and never go back, so that neighbours stay together and a pipeline's stages follow the
    nodes; engines take the first room that is left, and after them the blocks of reference ranks.

    Raises:
        NoRoomError: a block or an engine fits nowhere.
    """
    free = [node.free for node in nodes]
    places: list[int] = []
    current = 0
    for block in blocks:
        current = _first_with_room(free, block, start=current)
        free[current] -= block
        places += [current] * block
    for engine in engines:
        node = _first_with_room(free, engine, start=0)
        free[node] -= engine
        places.append(node)
    for block in references:
        node = _first_with_room(free, block, start=0)
        free[node] -= block
        places += [node] * block
    return places


def fits_on_nodes(config: RunConfig, devices: Sequence[int]) -> bool:
    """Return whether the run fits on empty nodes with so many devices each."""
    references = reference_blocks(config)
    others = bundle_sizes(config)[config.trainer.parallel.world_size :]
    engines = others[: len(others) - sum(references)]
    try:
        assign_nodes(tensor_blocks(config), engines, [NodeRoom("", count) for count in devices], references)
    except NoRoomError:
        return False
    return True


def along_devices(nodes: Sequence[str], devices: Sequence[int]) -> list[int]:
    """Indices of bundles in the order of their nodes, as these come first in ``nodes``, and then of their devices."""
    first = {node: index for index, node in reversed(list(enumerate(nodes)))}
    return sorted(range(len(nodes)), key=lambda bundle: (first[nodes[bundle]], devices[bundle]))


def _first_with_room(free: Sequence[int], size: int, start: int) -> int:
    for node in range(start, len(free)):
        if free[node] >= size:
            return node
    raise NoRoomError(size)
