"""Devices of a node, counted without torch or Ray."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

from slime_like.config import RunConfig
from slime_like.orchestration.bundles import NodeRoom, NoRoomError, assign_nodes, bundle_sizes, tensor_blocks

_GPU = re.compile(r"nvidia\d+")


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
    blocks, engines = tensor_blocks(config), bundle_sizes(config)[config.trainer.parallel.world_size :]
    step = math.lcm(config.trainer.parallel.tensor, config.rollout.tensor if engines else 1)
    slots = step * math.ceil(max(sum([*blocks, *engines]) / nodes, *blocks, *engines) / step)
    while not _fits(blocks, engines, [NodeRoom("", slots)] * nodes):
        slots += step
    return slots


def _fits(blocks: list[int], engines: list[int], nodes: list[NodeRoom]) -> bool:
    try:
        assign_nodes(blocks, engines, nodes)
    except NoRoomError:
        return False
    return True
