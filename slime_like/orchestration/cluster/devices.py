"""Devices of a node, counted without torch or Ray."""

import math
import os
import re
from pathlib import Path

from slime_like.config import RunConfig
from slime_like.orchestration.cluster.bundles import bundle_sizes, fits_on_nodes, reference_blocks, tensor_blocks

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
    blocks, references = tensor_blocks(config), reference_blocks(config)
    others = bundle_sizes(config)[config.trainer.parallel.world_size :]
    engines = others[: len(others) - sum(references)]
    step = math.lcm(config.trainer.parallel.tensor, *engines, *references)
    slots = step * math.ceil(max(sum([*blocks, *others]) / nodes, *blocks, *engines, *references) / step)
    while not fits_on_nodes(config, [slots] * nodes):
        slots += step
    return slots


def devices_per_node(config: RunConfig, nodes: int, given: int | None) -> int:
    """Devices that a plan counts with: those given, else this node's GPUs, else those of the recipe, else CPU slots."""
    count = given or local_gpus()
    if not count and "gpus_per_node" in config.cluster.model_fields_set:
        count = config.cluster.gpus_per_node
    return count or slots_per_node(config, nodes)
