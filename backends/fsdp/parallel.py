"""Process groups of one trainer rank: data replicas, and the context ranks inside each.

Rank = data * context size + context, as in the Megatron trainer. Weights, gradients and optimizer state are sharded
over all ranks in every layout.
"""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from slime_like.config import TrainerConfig
from slime_like.interfaces import RankCoordinates


@dataclass(frozen=True, slots=True)
class Groups:
    """The process groups of one rank.

    ``mesh`` has all ranks, and everything is sharded over it; ``replicas`` has one rank of every replica.
    """

    mesh: DeviceMesh
    context: dist.ProcessGroup
    replicas: dist.ProcessGroup

    @property
    def coordinates(self) -> RankCoordinates:
        """This rank's position on every axis."""
        data, context = self.replicas.rank(), self.context.rank()
        return RankCoordinates(0, 0, context, data, 0, self.replicas.size())


def build_groups(trainer: TrainerConfig) -> Groups:
    """Build the layout's groups in an existing world, each with the step's time limit. Collective."""
    parallel, timeout = trainer.parallel, timedelta(seconds=trainer.step_timeout_s)
    context = [[data * parallel.context + index for index in range(parallel.context)] for data in range(parallel.data)]
    context_group, _ = dist.new_subgroups_by_enumeration(context, timeout=timeout)
    replica_group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in zip(*context, strict=True)], timeout)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (parallel.world_size,), mesh_dim_names=("shard",))
    return Groups(mesh, context_group, replica_group)


def rows_of_rank(parameter: Tensor) -> range:
    """Return this rank's rows of a parameter. FSDP splits the first axis like ``torch.chunk``."""
    count = parameter.shape[0]
    each = -(-count // dist.get_world_size())
    return range(min(dist.get_rank() * each, count), min((dist.get_rank() + 1) * each, count))


def shard_of(parameter: Tensor) -> Tensor:
    """Return a view of this rank's rows."""
    if not isinstance(parameter, DTensor):
        raise TypeError(f"a {type(parameter).__name__} is not a sharded tensor")
    return parameter.to_local()


def joined(shard: Tensor, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Gather the tensor of ``shape`` from each rank's rows."""
    size, shard = dist.get_world_size(), shard.to(device, dtype)
    if size == 1:
        return shard
    rows = -(-shape[0] // size)
    padded = shard.new_zeros(rows, *shape[1:])
    padded[: len(shard)] = shard
    whole = shard.new_empty(size * rows, *shape[1:])
    dist.all_gather_into_tensor(whole, padded)
    return whole[: shape[0]]


def leave() -> None:
    """Dissolve the process groups."""
    if dist.is_initialized():
        dist.destroy_process_group()
