"""Checks of sizes that must fit each other: replicas, engines, GPUs, samples of a minibatch."""

from collections.abc import Iterator

from slime_like.config.filling import AUTO, ENGINES, REPLICAS, gpus_needed
from slime_like.config.run import RunConfig
from slime_like.system.words import counted


def idle_gpu_problems(config: RunConfig) -> Iterator[str]:
    """Check that the run uses all GPUs of the cluster."""
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


def colocation_problems(config: RunConfig) -> Iterator[str]:
    """Check that there are enough trainer ranks for colocated engines to share devices with."""
    engines, tensor = config.rollout.num_engines, config.rollout.tensor
    ranks = config.trainer.parallel.world_size
    if config.cluster.placement == "colocated" and engines * tensor > ranks:
        yield (
            f"cluster.placement=colocated: rollout.num_engines={engines} times rollout.tensor={tensor} is more than "
            f"the {ranks} trainer ranks; use at most {ranks} in all, or placement: separate"
        )


def minibatch_problems(config: RunConfig) -> Iterator[str]:
    """Check that a step has enough samples for its minibatches and replicas."""
    prompts, minibatches = config.rollout.prompts_per_step, config.algorithm.minibatches
    samples = 1 if config.supervised else config.rollout.samples_per_prompt
    replicas = config.trainer.parallel.data
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
