"""What trainers and engines ask of each other and of the cluster: devices, and the weights' way between them."""

from collections.abc import Iterator

from slime_like.config.filling import AUTO, ENGINES, REPLICAS, fill, gpus_needed, has_own_engines
from slime_like.config.run import RunConfig
from slime_like.system.words import counted


def idle_gpu_problems(config: RunConfig) -> Iterator[str]:
    """GPUs of the cluster that nothing uses."""
    cluster, needed = config.cluster, gpus_needed(config)
    if cluster.nodes is None or cluster.allow_idle_gpus:
        return
    gpus = cluster.nodes * cluster.gpus_per_node
    if needed.total < gpus:
        yield (
            f"cluster.nodes={cluster.nodes} times cluster.gpus_per_node={cluster.gpus_per_node}: "
            f"{gpus - needed.total} of {gpus} GPUs are idle, as the run uses {needed}; {_filling(config, gpus)}, or "
            "set cluster.allow_idle_gpus=true"
        )


def _filling(config: RunConfig, gpus: int) -> str:
    """Settings with which the run uses all of these GPUs, or fewer nodes without idle GPUs."""
    colocated = not config.supervised and not has_own_engines(config)
    choices = [(REPLICAS, ENGINES)] if colocated else [(REPLICAS,), *([] if config.supervised else [(ENGINES,)])]
    given = config.cluster.model_copy(update={"gpus_per_node": config.cluster.gpus_per_node})  # if it was a default
    sized = config.model_copy(update={"cluster": given})
    remedies = [
        f"set {' and '.join(f'{name}={AUTO}' for name in names)}"
        for names in choices
        if gpus_needed(fill(sized, names)).total == gpus
    ]
    if not remedies:
        ranks = config.trainer.parallel.world_size // config.trainer.parallel.data
        remedies.append(f"choose tensor * pipeline * context of trainer.parallel, now {ranks}, to divide the GPUs")
    nodes, rest = divmod(gpus_needed(config).total, config.cluster.gpus_per_node)
    return ", ".join([*remedies, *([] if rest else [f"use {counted(nodes, 'node')}"])])


def colocation_problems(config: RunConfig) -> Iterator[str]:
    """Do colocated engines find enough trainer ranks to share with?"""
    engines, tensor = config.rollout.num_engines, config.rollout.tensor
    ranks = config.trainer.parallel.world_size
    if config.cluster.placement == "colocated" and engines * tensor > ranks:
        yield (
            f"cluster.placement=colocated: rollout.num_engines={engines} times rollout.tensor={tensor} is more than "
            f"the {ranks} trainer ranks; use at most {ranks} in all, or placement: separate"
        )


def transport_problems(config: RunConfig) -> Iterator[str]:
    """What is known of the weights' way before devices are; the rest is checked when it is opened."""
    sync, colocated = config.sync, config.cluster.placement == "colocated"
    if sync.transport == "directory":
        if sync.directory is None:
            yield (
                "sync.transport=directory needs sync.directory, one that trainers and engines both see; give one, or "
                "use transport: auto"
            )
    elif sync.directory is not None:
        yield f"sync.directory={sync.directory} is used by sync.transport=directory only, and not by {sync.transport}"
    if sync.transport == "nccl" and colocated:
        yield (
            "sync.transport=nccl needs a separate device for every process, but with cluster.placement=colocated "
            "engines share the trainers'; use auto"
        )
    if sync.transport == "colocated" and not colocated:
        yield "sync.transport=colocated needs cluster.placement=colocated, engines on the trainers' devices; use auto"
    if sync.transport == "colocated" and sync.delta == "always":
        yield "sync.transport=colocated carries whole tensors, but sync.delta=always asks for changes; use delta: auto"
