"""What trainers and engines ask of each other: devices that they share, and the weights' way between them."""

from collections.abc import Iterator

from slime_like.config.run import RunConfig


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
