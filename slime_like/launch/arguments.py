"""What a node runs to take part: ``slime-like train``, ``slime-like plan``, and Ray."""

from __future__ import annotations

import json
from pathlib import Path

from slime_like.config import RunConfig
from slime_like.launch.directory import launch_directory
from slime_like.launch.options import LaunchOptions
from slime_like.orchestration.cluster.devices import local_gpus, slots_per_node
from slime_like.orchestration.cluster.place import Place
from slime_like.orchestration.cluster.ray_node import RayNodeSpec, make_directory


def train_arguments(options: LaunchOptions, cluster: str | None) -> list[str]:
    """``slime-like train`` as node 0 runs it."""
    address = ["--cluster.address", cluster] if cluster else []
    return ["train", *([str(options.config)] if options.config else []), *options.flags, *address]


def plan_arguments(options: LaunchOptions, config: RunConfig) -> list[str]:
    """``slime-like plan`` for the cluster that is started, also written to ``plan_path``."""
    own = ["--preflight", "--output", str(plan_path(config))]
    size = ["--cluster.nodes", str(options.nodes), "--cluster.gpus_per_node", str(devices_per_node(options, config))]
    return ["plan", *([str(options.config)] if options.config else []), *own, *options.flags, *size]


def plan_path(config: RunConfig) -> Path:
    """Where the plan of a launch is written."""
    return launch_directory(config.run_dir) / "plan.json"


def remove_plan(config: RunConfig) -> None:
    """Remove the plan of an earlier start, and make the directory for a new one."""
    plan_path(config).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    plan_path(config).unlink(missing_ok=True)


def why_it_does_not_fit(output: Path) -> str:
    """The problems of a plan that was written to ``output``, as one sentence."""
    problems = json.loads(output.read_text(encoding="utf-8"))["problems"]
    return "; ".join(problems) or "it needs more memory than a GPU has; its table on node 0 says where"


def devices_per_node(options: LaunchOptions, config: RunConfig) -> int:
    """What a plan counts with: GPUs of this node, where it has none those of the recipe, else CPU slots."""
    given = options.gpus_per_node or local_gpus()
    if not given and "gpus_per_node" in config.cluster.model_fields_set:
        given = config.cluster.gpus_per_node
    return given or slots_per_node(config, options.nodes)


def ray_spec(options: LaunchOptions, config: RunConfig, place: Place, gcs: str | None) -> RayNodeSpec:
    """Ray as this node starts it."""
    slots = None if local_gpus() else slots_per_node(config, options.nodes)
    store = config.cluster.object_store_mb
    return RayNodeSpec(place.rank, place.address, gcs, str(make_directory()), slots, store, options.port)
