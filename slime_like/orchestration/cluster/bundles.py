"""Bundles of devices of a run, their nodes, and the devices of a node; counted without torch or Ray."""

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slime_like.config import RunConfig

RANK_LABEL = "slime-like.io/node-rank"
"""Label of Ray's nodes: the order in which they are filled."""

_GPU = re.compile(r"nvidia\d+")


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
    for size, bundles in [*((engine, 1) for engine in engines), *((block, block) for block in references)]:
        node = _first_with_room(free, size, start=0)
        free[node] -= size
        places += [node] * bundles
    return places


def fits_on_nodes(config: RunConfig, devices: Sequence[int]) -> bool:
    """Return whether the run fits on empty nodes with so many devices each."""
    blocks, engines, references = _pieces(config)
    try:
        assign_nodes(blocks, engines, [NodeRoom("", count) for count in devices], references)
    except NoRoomError:
        return False
    return True


def _pieces(config: RunConfig) -> tuple[list[int], list[int], list[int]]:
    """Blocks of trainer ranks, separate engines, and blocks of reference ranks: each piece is placed whole."""
    blocks, references, sizes = tensor_blocks(config), reference_blocks(config), bundle_sizes(config)
    return blocks, sizes[sum(blocks) : len(sizes) - sum(references)], references


def along_devices(nodes: Sequence[str], devices: Sequence[int]) -> list[int]:
    """Indices of bundles in the order of their nodes, as these come first in ``nodes``, and then of their devices."""
    first = {node: index for index, node in reversed(list(enumerate(nodes)))}
    return sorted(range(len(nodes)), key=lambda bundle: (first[nodes[bundle]], devices[bundle]))


def _first_with_room(free: Sequence[int], size: int, start: int) -> int:
    for node in range(start, len(free)):
        if free[node] >= size:
            return node
    raise NoRoomError(size)


def local_gpus(devices: Path = Path("/dev")) -> int:
    """NVIDIA GPUs that processes started here may use: those of ``CUDA_VISIBLE_DEVICES``, else all there are."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    there = sum(bool(_GPU.fullmatch(entry.name)) for entry in devices.iterdir())
    if visible is None or not there:
        return there
    return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])


def slots_per_node(config: RunConfig, nodes: int) -> int:
    """CPU slots that each of several nodes without GPUs must offer so that ranks and engines are spread evenly.

    What must not be divided between nodes (a tensor-parallel group, an engine) is placed whole, and divides a node's
    slots, as it must divide its GPUs.
    """
    blocks, engines, references = _pieces(config)
    pieces = [*blocks, *engines, *references]
    step = math.lcm(config.trainer.parallel.tensor, *engines, *references)
    slots = step * math.ceil(max(sum(pieces) / nodes, *pieces) / step)
    while not fits_on_nodes(config, [slots] * nodes):
        slots += step
    return slots


def devices_per_node(config: RunConfig, nodes: int, given: int | None) -> int:
    """Devices that a plan counts with: those given, else this node's GPUs, else those of the recipe, else CPU slots."""
    count = given or local_gpus()
    if not count and "gpus_per_node" in config.cluster.model_fields_set:
        count = config.cluster.gpus_per_node
    return count or slots_per_node(config, nodes)
