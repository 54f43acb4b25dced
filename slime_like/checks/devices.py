"""Checks of sizes that must fit each other: replicas, engines, GPUs, samples of a minibatch."""

from collections.abc import Iterator

from slime_like.config.algorithm import AlgorithmConfig
from slime_like.config.filling import AUTO, ENGINES, REPLICAS, gpus_needed
from slime_like.config.rollout import RolloutConfig
from slime_like.config.run import RunConfig
from slime_like.config.sections import ClusterConfig
from slime_like.system.words import counted


def idle_gpu_problems(config: RunConfig) -> Iterator[str]:
    cluster, needed = config.cluster, gpus_needed(config)
    if cluster.nodes is None or cluster.allow_idle_gpus:
        return
    gpus = cluster.nodes * cluster.gpus_per_node
    if needed.total < gpus:
        replica = config.trainer.parallel.world_size // config.trainer.parallel.data
        if gpus % replica and cluster.placement == "colocated":
            remedy = f"choose tensor * pipeline * context of trainer.parallel, now {replica}, to divide the GPUs"
        else:
            remedy = f"set {REPLICAS}={AUTO} or {ENGINES}={AUTO}"
        if (fewer := needed.nodes(cluster.gpus_per_node)) < cluster.nodes:
            remedy += f", use {counted(fewer, 'node')}"
        yield (
            f"cluster.nodes={cluster.nodes} times cluster.gpus_per_node={cluster.gpus_per_node}: "
            f"{gpus - needed.total} of {gpus} GPUs are idle, because the run uses {needed}; {remedy}, or "
            "set cluster.allow_idle_gpus=true"
        )


def colocation_problems(rollout: RolloutConfig, cluster: ClusterConfig, ranks: int) -> Iterator[str]:
    """Check that there are enough trainer ranks for colocated engines to share devices with."""
    engines, size = rollout.num_engines, rollout.ranks
    if cluster.placement == "colocated" and engines * size > ranks:
        yield (
            f"cluster.placement=colocated: rollout.num_engines={engines} times rollout.tensor * pipeline={size} is "
            f"more than the {ranks} trainer ranks; use at most {ranks} in all, or placement: separate"
        )


def engine_node_problems(rollout: RolloutConfig, per_node: int, factors: bool, routing_replay: str) -> Iterator[str]:
    """Check that an engine's ranks are spread evenly: whole stages per node, or equal parts of each stage.

    Args:
        factors: engines receive ``model.lora``'s factors.
    """
    nodes, given = -(-rollout.ranks // per_node), f"rollout.tensor={rollout.tensor}"
    if rollout.pipeline > 1:
        given += f", rollout.pipeline={rollout.pipeline}"
        for setting, is_set in {
            "model.lora.sync=adapter": factors,
            "algorithm.routing_replay=rollout": routing_replay == "rollout",
        }.items():
            if is_set:
                yield f"{given}: {setting} needs every layer on each rank of an engine; use rollout.pipeline=1"
    if nodes == 1:
        return
    if rollout.engine not in ("vllm", "sglang"):
        yield (
            f"{given} is more than cluster.gpus_per_node={per_node}, and rollout.engine={rollout.engine} does not span "
            "nodes; use vllm or sglang, or lower it"
        )
    of_stage = max(1, nodes // rollout.pipeline)
    if (rollout.pipeline % nodes and nodes % rollout.pipeline) or rollout.tensor % of_stage:
        yield (
            f"{given}: {rollout.ranks} ranks do not split evenly over the {nodes} nodes of "
            f"cluster.gpus_per_node={per_node} that they need; use a multiple of {per_node} ranks"
        )


def minibatch_problems(rollout: RolloutConfig, algorithm: AlgorithmConfig, replicas: int) -> Iterator[str]:
    """Check that a step has enough samples for its minibatches and replicas."""
    prompts, minibatches = rollout.prompts_per_step, algorithm.minibatches
    samples = 1 if algorithm.supervised else rollout.samples_per_prompt
    if minibatches > prompts:
        yield (
            f"algorithm.minibatches={minibatches} is more than rollout.prompts_per_step={prompts}: each minibatch "
            f"needs a prompt; use at most {prompts}"
        )
    elif prompts // minibatches * samples < replicas:
        yield (
            f"trainer.parallel.data={replicas} is more than the {prompts // minibatches * samples} samples of a "
            "minibatch: each data-parallel replica needs one; lower it, or raise rollout.prompts_per_step"
        )
