"""Problems of a run on a cluster, found without the cluster. Every problem has its remedy."""

import shutil
from collections.abc import Iterator
from pathlib import Path

from slime_like.checks.layout import divisors, either
from slime_like.config import CheckpointConfig, ClusterConfig, RunConfig
from slime_like.config.filling import gpus_needed
from slime_like.models.tower import language_names
from slime_like.models.weight_files import header_shapes
from slime_like.system.gpus import GPUS
from slime_like.system.network import is_free
from slime_like.system.words import memory_text, traffic_text

_OPTIMIZER_BYTES = 12
"""Bytes of a parameter's optimizer state in a checkpoint: main weight and two moments in float32."""

_TOKEN_BYTES, _RESPONSE_BYTES = 17, 33
"""Bytes of a token in a pack, and additional bytes of a response's token."""

_SHOWN = 5


def object_store_notes(cluster: ClusterConfig, largest: int) -> Iterator[str]:
    """Warn if node 0's object store does not hold a step's packs, so Ray writes them to disk."""
    if cluster.address is None and largest > cluster.object_store_mb * 2**20:
        problem = f"a step's packs take up to {memory_text(largest)}, and Ray writes what exceeds the store to disk"
        yield f"cluster.object_store_mb={cluster.object_store_mb}: {problem}; set at least {-(-largest // 2**20)}"


def largest_batch_bytes(config: RunConfig) -> int:
    """Count the bytes of a step's packs (``PackedTrajectory``) if all sequences have the maximum length."""
    rollout, prompt = config.rollout, config.data.max_prompt_tokens
    samples = rollout.prompts_per_step * config.samples_per_row
    response = config.longest_row - prompt
    scored = sum(role.scores or not role.trained for role in config.roles.values())
    support = 1 + rollout.bounded_top_k if rollout.bounded_top_k > 0 else 0
    per_token = _RESPONSE_BYTES + 4 * (scored + support)
    return samples * ((prompt + response) * _TOKEN_BYTES + response * per_token)


def idle_engine_notes(config: RunConfig) -> Iterator[str]:
    """Warn if colocated engines leave GPUs of the trainer without an engine."""
    number, size, gpus = config.rollout.num_engines, config.rollout.ranks, config.trainer.parallel.world_size
    if config.cluster.placement == "colocated" and config.starts_engines and number < gpus // size:
        idle = f"{gpus - number * size} of the trainer's {gpus} GPUs are idle during generation"
        yield f"rollout.num_engines={number}: {idle}; set {gpus // size}, or auto"


def placement_problems(config: RunConfig) -> Iterator[str]:
    """Check that all GPUs exist and that tensor-parallel groups stay inside a node."""
    needed = gpus_needed(config)
    per_node, nodes = config.cluster.gpus_per_node, config.cluster.nodes
    if nodes is not None and needed.total > nodes * per_node:
        there = f"cluster.nodes={nodes} times cluster.gpus_per_node={per_node}"
        remedy = f"use {needed.nodes(per_node)} nodes, or a smaller trainer.parallel (data=auto takes what fits)"
        yield f"{there}: needs {needed}, has {nodes * per_node}; {remedy}"
    sizes = [("trainer.parallel.tensor", config.trainer.parallel.tensor)]
    if config.starts_engines and config.cluster.nodes_for(config.rollout.ranks) == 1:
        field = "rollout.tensor" + " * rollout.pipeline" * (config.rollout.pipeline > 1)
        sizes.append((field, config.rollout.ranks))
    sizes += [(f"{role.section}.parallel.tensor", role.parallel.tensor) for role in config.roles.with_workers]
    for field, size in dict(sizes).items():
        if per_node % size:
            problem = f"does not divide cluster.gpus_per_node={per_node}, so a group of ranks would cross nodes"
            yield f"{field}={size} {problem}; use {either(divisors(per_node))}"


def gpu_problems(config: RunConfig) -> Iterator[str]:
    if config.trainer.fp8 != "none" and not GPUS[config.cluster.gpu].has_fp8:
        yield f"trainer.fp8={config.trainer.fp8}: cluster.gpu={config.cluster.gpu} has no products in FP8; use none"


def tensor_problems(path: Path, expected: dict[str, tuple[int, ...]]) -> Iterator[str]:
    """Compare the names and shapes of stored tensors with the expected ones. Reads only headers.

    Raises ``WeightFilesError`` if the weight files cannot be read.
    """
    shapes = header_shapes(path)
    found = {own: shapes[name] for name, own in language_names(path, shapes).items()}
    missing = sorted(expected.keys() - found.keys())
    # A checkpoint may contain a tied output projection in addition to the embedding.
    unexpected = sorted(found.keys() - expected.keys() - {"lm_head.weight"})
    other = [
        f"{name} is {list(found[name])}, should be {list(expected[name])}"
        for name in sorted(expected.keys() & found.keys())
        if expected[name] != found[name]
    ]
    for what, names in (("missing", missing), ("not of this architecture", unexpected), ("of another shape", other)):
        if names:
            some = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
            problem = f"{len(names)} tensors are {what} ({some})"
            yield f"model.path={path}: {problem}; use the config.json and the weights of the same model"


def disk_bytes(checkpoint: CheckpointConfig, dtype: str, trained: int, steps: int) -> int:
    """Return a run's peak disk use: the checkpoints it keeps, one more while it is written, and the exported model.

    Args:
        trained: number of trained parameters.
    """
    item = 4 if dtype == "float32" else 2
    kept = checkpoint.keep + (steps // checkpoint.keep_every if checkpoint.keep_every else 0)
    return trained * ((kept + 1) * (item + _OPTIMIZER_BYTES) + item * checkpoint.export_hf)


def preflight_problems(run_dir: Path, needed: int, port: int | None) -> Iterator[str]:
    """Check this machine, which is part of the cluster: ``needed`` bytes of disk, and the ranks' rendezvous port."""
    nearest = next(parent for parent in (run_dir, *run_dir.parents) if parent.exists())
    free = shutil.disk_usage(nearest).free
    if free < needed:
        problem = f"its disk has {traffic_text(free)} free, and checkpoints take up to {traffic_text(needed)}"
        yield f"run_dir={run_dir}: {problem}; free some, use another directory, or lower checkpoint.keep"
    if port is not None and not is_free("", port):
        yield f"trainer.rendezvous_port={port} is in use on this machine; give another one, or none for a free one"
