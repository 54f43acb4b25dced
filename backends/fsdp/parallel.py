"""Process groups of one trainer rank: replicas of the data, and context ranks inside each.

Rank = data * context size + context, as in the other trainer. Weights, gradients and optimizer state are sharded over
all ranks, whatever the layout is.
"""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from slime_like.config import RunConfig
from slime_like.interfaces import RankCoordinates


@dataclass(frozen=True, slots=True)
class Groups:
    """The process groups of one rank.

    ``mesh`` has all ranks, over which everything is sharded; ``replicas`` one rank of every replica.
    """

    mesh: DeviceMesh
    context: dist.ProcessGroup
    replicas: dist.ProcessGroup

    @property
    def coordinates(self) -> RankCoordinates:
        """This rank's place on every axis."""
        data, context = self.replicas.rank(), self.context.rank()
        return RankCoordinates(0, 0, context, data, 0, self.replicas.size())


def build_groups(config: RunConfig) -> Groups:
    """The groups of the configured layout, each with the step's time limit, inside a world that exists. Collective."""
    parallel, timeout = config.trainer.parallel, timedelta(seconds=config.trainer.step_timeout_s)
    context = [[data * parallel.context + index for index in range(parallel.context)] for data in range(parallel.data)]
    context_group, _ = dist.new_subgroups_by_enumeration(context, timeout=timeout)
    replica_group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in zip(*context, strict=True)], timeout)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (parallel.world_size,), mesh_dim_names=("shard",))
    return Groups(mesh, context_group, replica_group)


def rows_of_rank(parameter: Tensor) -> range:
    """This rank's rows of a parameter: FSDP cuts the first axis as ``torch.chunk`` does."""
    count = parameter.shape[0]
    each = -(-count // dist.get_world_size())
    return range(min(dist.get_rank() * each, count), min((dist.get_rank() + 1) * each, count))


def leave() -> None:
    """Dissolve the process groups."""
    if dist.is_initialized():
        dist.destroy_process_group()
