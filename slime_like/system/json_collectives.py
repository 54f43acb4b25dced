"""Plain values between ranks, as JSON in tensors of bytes. torch's object collectives unpickle, which can execute code.

Every call is collective over the world. Values must be JSON types. Tuples arrive as lists.
"""

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def gather_json(value: Any, device: torch.device) -> list[Any] | None:
    """Return every rank's ``value`` on rank 0, and ``None`` on the others. The backend supports ``device``."""
    padded, sizes = _padded(value, device)
    if dist.get_rank() > 0:
        dist.gather(padded)
        return None
    everyones = [torch.empty_like(padded) for _ in sizes]
    dist.gather(padded, everyones)
    return _decoded(everyones, sizes)


def all_gather_json(value: Any, device: torch.device) -> list[Any]:
    """Return every rank's ``value`` on every rank; see ``gather_json``."""
    padded, sizes = _padded(value, device)
    everyones = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(everyones, padded)
    return _decoded(everyones, sizes)


def _padded(value: Any, device: torch.device) -> tuple[Tensor, list[int]]:
    """Return the JSON text as uint8, padded to the length of the longest one, and the size of every rank's text."""
    text = bytearray(json.dumps(value, separators=(",", ":")).encode())  # never empty
    data = torch.frombuffer(text, dtype=torch.uint8).to(device)
    own = torch.tensor([data.numel()], dtype=torch.int64, device=device)
    everyones = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, own)
    sizes = [int(size) for size in everyones]
    return torch.nn.functional.pad(data, (0, max(sizes) - data.numel())), sizes


def _decoded(everyones: list[Tensor], sizes: list[int]) -> list[Any]:
    return [json.loads(one[:size].cpu().numpy().tobytes()) for one, size in zip(everyones, sizes, strict=True)]
