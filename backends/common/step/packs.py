"""A pack on its way into a model."""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from slime_like.trajectory import PackedTrajectory


@dataclass
class ResponseRows:
    """Local hidden states that predict response tokens, and their targets.

    Attributes:
        index: (r,) int64 rows of the local token axis whose hidden state predicts a response token.
        targets: (r,) int64 token ids.
        temperatures: (r,) float64.
    """

    index: Tensor
    targets: Tensor
    temperatures: Tensor


def on_device(pack: PackedTrajectory, device: torch.device) -> PackedTrajectory:
    """``pack`` itself if it is there already, else a copy."""
    tensors = {f.name: value for f in fields(pack) if isinstance(value := getattr(pack, f.name), Tensor)}
    if all(tensor.device == device for tensor in tensors.values()):
        return pack
    moved: dict[str, Any] = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
    return replace(pack, **moved)
