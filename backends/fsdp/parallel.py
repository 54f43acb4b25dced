"""Process groups of one trainer rank (data replicas, and the context ranks inside each), and sharding over them.

Rank = data * context size + context, as in the Megatron trainer. Weights, gradients and optimizer state are sharded
over all ranks in every layout.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as recompute
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from slime_like.config import TrainerConfig
from slime_like.interfaces import RankCoordinates


@dataclass(frozen=True, slots=True)
class FsdpGroups:
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


def build_groups(trainer: TrainerConfig) -> FsdpGroups:
    """Build the layout's groups in an existing world, each with the step's time limit. Collective."""
    parallel, timeout = trainer.parallel, timedelta(seconds=trainer.step_timeout_s)
    context = [[data * parallel.context + index for index in range(parallel.context)] for data in range(parallel.data)]
    context_group, _ = dist.new_subgroups_by_enumeration(context, timeout=timeout)
    replica_group, _ = dist.new_subgroups_by_enumeration([list(ranks) for ranks in zip(*context, strict=True)], timeout)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = init_device_mesh(device, (parallel.world_size,), mesh_dim_names=("shard",))
    return FsdpGroups(mesh, context_group, replica_group)


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


def gather_tensor(shard: Tensor, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
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


def recompute_layers(model: Any, trainer: TrainerConfig) -> None:
    """Recompute the first layers in backward."""
    for layer in model.layers[: trainer.recomputed_layers(len(model.layers))]:
        recompute(layer)


def shard_layers(model: Any, dtype: torch.dtype, trainer: TrainerConfig, groups: FsdpGroups) -> None:
    """Shard the model. Each layer is gathered separately; the root gathers embedding, last norm and head together."""
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    on_host = trainer.optimizer.offload
    offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if on_host else OffloadPolicy()
    options: dict[str, Any] = {"mesh": groups.mesh, "mp_policy": precision, "offload_policy": offload}
    for layer in model.layers:
        fully_shard(layer, reshard_after_forward=trainer.fsdp.reshard_after_forward, **options)
    fully_shard(model, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # FSDP averages over ranks. A step's gradients are sums, divided once by the step's denominator.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Inside, new modules get parameters without memory, but real buffers.

    Only one parameter at a time has memory, briefly and untouched.
    """
    register = nn.Module.register_parameter

    def without_memory(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = without_memory  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
