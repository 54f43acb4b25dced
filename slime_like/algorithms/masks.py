"""What a loss mask must be."""

from __future__ import annotations

import torch
from torch import Tensor


def require_bool_mask(loss_mask: Tensor) -> None:
    """Raises ``ValueError`` for a mask of numbers, which indexing would take for positions."""
    if loss_mask.dtype != torch.bool:
        raise ValueError(f"loss_mask is {loss_mask.dtype}; give a bool, True where a token carries loss")
