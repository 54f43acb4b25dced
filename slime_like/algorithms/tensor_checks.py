"""Checks of tensor arguments that torch would broadcast or misinterpret without an error."""

import torch
from torch import Tensor


def require_alike(**given: Tensor | None) -> None:
    """Raise ``ValueError`` if a tensor's shape differs from the first one's. ``None`` is skipped."""
    (measure, first), *others = ((name, tensor) for name, tensor in given.items() if tensor is not None)
    for name, tensor in others:
        if tensor.shape != first.shape:
            shapes = f"{name} {tuple(tensor.shape)} and {measure} {tuple(first.shape)}"
            raise ValueError(f"{shapes} differ; give one entry of each per token")


def require_per_token(what: str, value: object, like: Tensor) -> None:
    """Raise ``ValueError`` if custom code didn't return one value per token."""
    if not isinstance(value, Tensor) or value.shape != like.shape:
        returned = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise ValueError(f"{what} returned {returned} for {like.numel()} tokens; return one value per token, (R,)")


def require_known_targets(targets: Tensor, vocab_size: int) -> None:
    """Raise ``ValueError`` for ids beyond the vocabulary. Waits for a device, since it reads the values."""
    if targets.numel() and int(targets.max()) >= vocab_size:
        raise ValueError(
            f"targets: id {int(targets.max())} is beyond the vocabulary of {vocab_size}; give smaller ids, or "
            "a negative one (-100) for tokens without a score"
        )


def require_bool_mask(mask: Tensor) -> None:
    """Raise ``ValueError`` for a mask of numbers, which indexing would interpret as positions."""
    if mask.dtype != torch.bool:
        raise ValueError(f"loss_mask is {mask.dtype}; give a bool, True where a token carries loss")


def require_temperatures(temperatures: Tensor) -> None:
    """Raise ``ValueError`` unless all temperatures are positive and finite."""
    fits = (temperatures > 0) & torch.isfinite(temperatures)
    if not bool(fits.all()):
        where = int((~fits).flatten().nonzero()[0])
        raise ValueError(
            f"temperature {float(temperatures.flatten()[where])} (entry {where}) cannot scale logits; give a positive "
            "one (1 for greedy samples)"
        )


def expanded_temperatures(temperatures: Tensor | float, targets: Tensor) -> Tensor:
    """Return one checked temperature per target, from a number or a tensor that expands to ``targets``' shape."""
    if not isinstance(temperatures, Tensor):
        temperatures = torch.tensor(temperatures, dtype=torch.float64, device=targets.device)
    require_temperatures(temperatures)
    return temperatures.expand(targets.shape).contiguous()
