"""Checks of tensor arguments."""

import torch
from torch import Tensor


def require_tensors(**given: object) -> None:
    """Raises ``ValueError`` for the first value, by the caller's name for it, that is neither tensor nor ``None``."""
    for name, value in given.items():
        if value is not None and not isinstance(value, Tensor):
            remedy = "a tensor, e.g. torch.tensor(...)" if isinstance(value, int | float) else "a tensor"
            if isinstance(value, list | tuple):
                remedy = f"torch.tensor({name})" if all(isinstance(x, int | float) for x in value) else "one tensor"
            raise ValueError(f"{name} is a {type(value).__name__}; give {remedy}")


def require_alike(**given: Tensor | None) -> None:
    """As ``require_tensors``, and for tensors of another shape than the first, with which they would be broadcast."""
    require_tensors(**given)
    (measure, first), *others = ((name, tensor) for name, tensor in given.items() if tensor is not None)
    for name, tensor in others:
        if tensor.shape != first.shape:
            shapes = f"{name} {tuple(tensor.shape)} and {measure} {tuple(first.shape)}"
            raise ValueError(f"{shapes} differ; give one entry of each per token")


def require_per_token(what: str, value: object, like: Tensor) -> None:
    """Raises ``ValueError`` where custom code returned something that would be broadcast, or is no tensor."""
    if not isinstance(value, Tensor) or value.shape != like.shape:
        returned = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise ValueError(f"{what} returned {returned} for {like.numel()} tokens; return one value per token, (R,)")


def require_targets(targets: Tensor) -> None:
    """Raises ``ValueError`` for ids of a type that is no index: a uint8 holds neither a vocabulary nor a -100."""
    if targets.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"targets are {targets.dtype}; give integer token ids, int64")


def require_known_targets(targets: Tensor, vocab_size: int) -> None:
    """Raises ``ValueError`` for ids beyond the vocabulary. Reads values: on a device it waits for them."""
    if targets.numel() and int(targets.max()) >= vocab_size:
        raise ValueError(
            f"targets reach up to {int(targets.max())}, the vocabulary to {vocab_size - 1}; give ids below that, or a "
            "negative one (-100) where a token is not scored"
        )


def require_bool_mask(mask: Tensor, name: str = "loss_mask") -> None:
    """Raises ``ValueError`` for a mask of numbers, which indexing would take for positions."""
    require_tensors(**{name: mask})
    if mask.dtype != torch.bool:
        raise ValueError(f"{name} is {mask.dtype}; give a bool, True where a token carries loss, e.g. {name}.bool()")


def require_temperatures(temperatures: Tensor) -> None:
    """Raises ``ValueError`` for one that is not positive, or not finite: logits are divided by them."""
    if not isinstance(temperatures, Tensor):
        raise ValueError(f"temperatures are a {type(temperatures).__name__}; give a number or a tensor")
    fits = (temperatures > 0) & torch.isfinite(temperatures)
    if not bool(fits.all()):
        where = int((~fits).flatten().nonzero()[0])
        raise ValueError(
            f"temperature {float(temperatures.flatten()[where])} (entry {where}) cannot scale logits; give positive "
            "ones (1 for greedy samples)"
        )


def expanded_temperatures(temperatures: Tensor | float, targets: Tensor) -> Tensor:
    """One temperature per target, from a number or a tensor that expands to the shape of ``targets``.

    Raises:
        ValueError: one that is not positive, or not finite, or a shape that does not expand.
    """
    if isinstance(temperatures, int | float):
        temperatures = torch.tensor(float(temperatures), dtype=torch.float64, device=targets.device)
    require_temperatures(temperatures)
    try:
        return temperatures.expand(targets.shape).contiguous()
    except RuntimeError as error:
        raise ValueError(
            f"temperatures have shape {tuple(temperatures.shape)}, targets {tuple(targets.shape)}; give one per target"
        ) from error
