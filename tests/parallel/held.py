"""Memory that a real rank holds throughout a run, counted from its tensors, independent of the planner."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

from torch import Tensor

from backends.megatron.parallel import alone_as
from backends.megatron.planning.estimate import _count_memory, _Rank, estimate, planned_attention
from slime_like.config import RunConfig
from slime_like.config.roles import POLICY
from slime_like.models.dimensions import ModelDimensions


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


def check_held(config: RunConfig, found: list[Held | None], whole: bool = False) -> None:
    """Check that the plan of every rank equals what the real rank holds, to the byte.

    Tracing a step takes most of a plan's time. If ``whole``, the last rank's plan includes it.
    """
    planned = [_planned_holdings(config, rank) for rank in range(len(found))]
    if whole:
        assert asdict(estimate(config, len(found) - 1).memory).items() >= planned[-1].items()
    for rank, (plan, real) in enumerate(zip(planned, found, strict=True)):
        assert Held(**{field.name: plan[field.name] for field in fields(Held)}) == real, f"rank {rank}"


def _planned_holdings(config: RunConfig, rank: int) -> dict[str, int]:
    """Return what the plan says that a rank holds, from its real modules and optimizer on shapes."""
    dimensions = ModelDimensions.from_checkpoint(config.model.path)
    trainer = config.trainer.model_copy(update={"attention": planned_attention(config.trainer, dimensions)})
    with alone_as(trainer, rank, on_meta=True):
        planned = _Rank(config.model_copy(update={"trainer": trainer}), config.roles[POLICY], dimensions)
        planned._update()  # makes the moments
        return _count_memory(planned._chunks, planned._wrapped, planned._optimizer)


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' storages, each counted once."""
    return sum(storages(tensors).values())


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the bytes of the tensors' storages, by address."""
    return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
