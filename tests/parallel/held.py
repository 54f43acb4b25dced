"""Memory that a real rank holds throughout a run, counted from its tensors, independent of the planner."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from backends.megatron.planning.estimate import estimate
from slime_like.config import RunConfig


@dataclass(frozen=True)
class Held:
    """Number of parameters, and bytes of their storages, of gradients, and of the optimizer's state."""

    parameters: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int


def held_by(trainer: Any) -> Held:
    """Count the memory of a trainer after a step. Storages are identified by address."""
    weights = [parameter for chunk in trainer.chunks for parameter in chunk.parameters()]
    of_weights = storages(weights)
    state: list[Tensor] = []
    for part in trainer.optimizer.megatron.chained_optimizers:
        if part.is_stub_optimizer:  # the rank has no parameters of this kind
            continue
        inner = part.optimizer
        state += [parameter for group in inner.param_groups for parameter in group["params"]]
        for moments in inner.state.values():
            state += [moments["exp_avg"], moments["exp_avg_sq"]]
    extra = {address: nbytes for address, nbytes in storages(state).items() if address not in of_weights}
    return Held(
        parameters=sum(weight.numel() for weight in weights),
        parameter_bytes=sum(of_weights.values()),
        gradient_bytes=storage_bytes(weight.main_grad for weight in weights if weight.requires_grad),
        optimizer_bytes=sum(extra.values()),
    )


def check_held(config: RunConfig, found: list[Held | None]) -> None:
    """Check that the plan of every rank equals what the real rank holds, to the byte."""
    for rank, real in enumerate(found):
        planned = estimate(config, rank).memory
        assert Held(**{field.name: getattr(planned, field.name) for field in fields(Held)}) == real, f"rank {rank}"


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' storages, each counted once."""
    return sum(storages(tensors).values())


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the bytes of the tensors' storages, by address."""
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
