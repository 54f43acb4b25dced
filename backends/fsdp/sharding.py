"""Sharding of a model without memory, and recomputation of its layers."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed._composable import checkpoint as recompute
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from backends.fsdp.parallel import Groups
from slime_like.config import TrainerConfig


def recompute_layers(model: Any, trainer: TrainerConfig) -> None:
    """Recompute the first layers in backward."""
    for layer in model.layers[: trainer.recomputed_layers(len(model.layers))]:
        recompute(layer)


def shard_layers(model: Any, dtype: torch.dtype, trainer: TrainerConfig, groups: Groups) -> None:
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
