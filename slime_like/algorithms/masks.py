"""What a loss mask and temperatures must be."""

from __future__ import annotations

import torch
from torch import Tensor


def require_bool_mask(loss_mask: Tensor) -> None:
    """Raises ``ValueError`` for a mask of numbers, which indexing would take for positions."""
    if loss_mask.dtype != torch.bool:
        raise ValueError(f"loss_mask is {loss_mask.dtype}; give a bool, True where a token carries loss")


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
