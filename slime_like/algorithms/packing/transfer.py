"""Moving many small tensors to a device in one copy."""

import math

import torch
from torch import Tensor

_ALIGNMENT = 8


def move_together(tensors: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Copy all tensors to ``device`` through one byte buffer; on the CPU they are returned as they are.

    Args:
        tensors: contiguous CPU tensors of any dtype.
        device: destination.

    Returns:
        The same names; off the CPU the tensors are views into one buffer.
    """
    if device.type == "cpu":
        return tensors
    offsets = _offsets(tensors)
    buffer = torch.empty(offsets[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    for tensor, offset in zip(tensors.values(), offsets[:-1], strict=True):
        buffer[offset : offset + tensor.nbytes].copy_(tensor.contiguous().flatten().view(torch.uint8))
    moved = buffer.to(device)
    return {
        name: moved[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for (name, tensor), offset in zip(tensors.items(), offsets[:-1], strict=True)
    }


def _offsets(tensors: dict[str, Tensor]) -> list[int]:
    """Aligned start of every tensor, and the total size as last entry."""
    offsets = [0]
    for tensor in tensors.values():
        offsets.append(offsets[-1] + math.ceil(tensor.nbytes / _ALIGNMENT) * _ALIGNMENT)
    return offsets
