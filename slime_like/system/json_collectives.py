"""Plain values between ranks, as JSON in tensors of bytes. torch's object collectives unpickle, which can execute code.

Every call is collective over ``group``, by default the world. Values must be JSON types. Tuples arrive as lists.
"""

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def gather_json(value: Any, device: torch.device, group: dist.ProcessGroup | None = None) -> list[Any] | None:
    """Return every rank's ``value`` on the group's first rank, and ``None`` on the others.

    Args:
        device: device that the group's backend supports.
    """
    data = _encoded(value, device)
    sizes = _sizes(data, group)
    padded = _padded(data, max(sizes))
    if dist.get_rank(group) > 0:
        dist.gather(padded, None, group=group, group_dst=0)
        return None
    everyones = [torch.empty_like(padded) for _ in sizes]
    dist.gather(padded, everyones, group=group, group_dst=0)
    return [_decoded(one[:size]) for one, size in zip(everyones, sizes, strict=True)]


def all_gather_json(value: Any, device: torch.device, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return every rank's ``value`` on every rank; see ``gather_json``."""
    data = _encoded(value, device)
    sizes = _sizes(data, group)
    padded = _padded(data, max(sizes))
    everyones = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(everyones, padded, group=group)
    return [_decoded(one[:size]) for one, size in zip(everyones, sizes, strict=True)]


def scatter_json(values: list[Any] | None, device: torch.device, group: dist.ProcessGroup | None = None) -> Any:
    """Return this rank's element of the first rank's ``values``. Other ranks pass ``None``."""
    encoded = None if values is None else [_encoded(value, device) for value in values]
    sizes = torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=device)
    if encoded is not None:
        sizes.copy_(torch.tensor([data.numel() for data in encoded]))
    dist.broadcast(sizes, group=group, group_src=0)
    own = torch.empty(int(sizes.max()), dtype=torch.uint8, device=device)
    padded = None if encoded is None else [_padded(data, own.numel()) for data in encoded]
    dist.scatter(own, padded, group=group, group_src=0)
    return _decoded(own[: int(sizes[dist.get_rank(group)])])


def _encoded(value: Any, device: torch.device) -> Tensor:
    """Return the JSON text as (n,) uint8. It is never empty."""
    text = bytearray(json.dumps(value, separators=(",", ":")).encode())
    return torch.frombuffer(text, dtype=torch.uint8).to(device)


def _decoded(data: Tensor) -> Any:
    return json.loads(data.cpu().numpy().tobytes())


def _sizes(data: Tensor, group: dist.ProcessGroup | None) -> list[int]:
    """Return the number of bytes of every rank's ``data``."""
    own = torch.tensor([data.numel()], dtype=torch.int64, device=data.device)
    everyones = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyones, own, group=group)
    return [int(size) for size in everyones]


def _padded(data: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(data, (0, size - data.numel()))
