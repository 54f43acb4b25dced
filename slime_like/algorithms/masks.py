"""Checks of loss masks and temperatures."""

import torch
from torch import Tensor

from slime_like.algorithms.tensor_checks import require_tensors


def require_bool_mask(mask: Tensor, name: str = "loss_mask") -> None:
    """Raises ``ValueError`` for a mask of numbers, which indexing would take for positions."""
    require_tensors(**{name: mask})
    if mask.dtype != torch.bool:
        raise ValueError(f"{name} is {mask.dtype}; give a bool, True where a token carries loss, e.g. {name}.bool()")


def require_temperatures(temperatures: Tensor) -> None:
    """Raises ``ValueError`` for one that is not positive, or not finite: logits are divided by them."""
    if not isinstance(temperatures, Tensor):
        raise ValueError(f"temperatures are a {type(temperatures).__name__}; give a tensor, e.g. torch.tensor(0.7)")
    fits = (temperatures > 0) & torch.isfinite(temperatures)
    if not bool(fits.all()):
        where = int((~fits).flatten().nonzero()[0])
        raise ValueError(
            f"temperature {float(temperatures.flatten()[where])} (entry {where}) cannot scale logits; give positive "
            "ones (1 for greedy samples)"
        )
