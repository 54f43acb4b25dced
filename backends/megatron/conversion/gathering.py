"""Gathering of many parameters' shards on the rank that merges them: one exchange for a whole batch."""

import contextlib
import functools
import mmap
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from slime_like.system.json_collectives import all_gather_json

_ALIGNMENT = 64
_TOKEN_BYTES = 64
_CPU = torch.device("cpu")


Gather = Callable[[Sequence[Tensor]], list[list[Tensor]] | None]
"""Gather of this rank's shards. The group's first rank gets all shards by rank, others ``None``. Collective.

The result of one call is valid until the next call."""


def packed_bytes(shards: Sequence[Tensor]) -> int:
    """Return the room that a batch takes."""
    return sum(_room(shard) for shard in shards)


def open_gather(group: dist.ProcessGroup | None, nbytes: int, device: torch.device) -> Gather:
    """Return the fastest way to gather batches of at most ``nbytes`` within ``group``. Collective over the group.

    Ranks on one host's CPU read each other's memory, which is freed with the gather and the tensors it returned. All
    others exchange messages.
    """
    if group is None or group.size() == 1:
        return _alone
    if device.type == "cpu":
        shared = _Segments(group, nbytes)
        if shared.everyone_sees:
            return shared.gather
    return functools.partial(_by_messages, group)


def _alone(shards: Sequence[Tensor]) -> list[list[Tensor]] | None:
    return [list(shards)]


def _room(shard: Tensor) -> int:
    return -(-shard.nbytes // _ALIGNMENT) * _ALIGNMENT


def _pack(shards: Sequence[Tensor], buffer: Tensor) -> None:
    for view, shard in zip(_unpack(shards, buffer), shards, strict=True):
        view.copy_(shard)


def _unpack(like: Sequence[Tensor], buffer: Tensor) -> list[Tensor]:
    """Return consecutive views of ``buffer``, (n,) uint8, with the types and shapes of ``like``."""
    views, offset = [], 0
    for shard in like:
        views.append(buffer[offset : offset + shard.nbytes].view(shard.dtype).view(shard.shape))
        offset += _room(shard)
    return views


def _by_messages(group: dist.ProcessGroup, shards: Sequence[Tensor]) -> list[list[Tensor]] | None:
    """Gather with the process group's backend."""
    packed = torch.empty(packed_bytes(shards), dtype=torch.uint8, device=shards[0].device)
    _pack(shards, packed)
    if group.rank() > 0:
        dist.gather(packed, None, group=group, group_dst=0)
        return None
    everyones = [torch.empty_like(packed) for _ in range(group.size())]
    dist.gather(packed, everyones, group=group, group_dst=0)
    return [_unpack(shards, buffer) for buffer in everyones]


class _Segments:
    """Memory of every other rank that the first rank maps, in two halves that are filled in turn.

    A rank fills a half and all ranks meet. Then the first rank reads it while the others fill the other half. At the
    next meeting it has finished with the first half, which may be filled again. The memory has no name in the file
    system, so it is freed with the last process that maps it, however that process ends.

    Attributes:
        everyone_sees: the first rank could map every segment; the same on all ranks.
    """

    def __init__(self, group: dist.ProcessGroup, nbytes: int) -> None:
        self._group = group
        self._half = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        self._turn = 0
        size = _TOKEN_BYTES + 2 * self._half
        with _offered(size) as offer:
            offers = [_Offer(*one) for one in all_gather_json(offer, _CPU, group)]
            self._maps = [_map(each, size) for each in (offers if group.rank() == 0 else [offer])]
            answers = all_gather_json(all(segment is not None for segment in self._maps), _CPU, group)
        self.everyone_sees = all(answers)

    def gather(self, shards: Sequence[Tensor]) -> list[list[Tensor]] | None:
        self._turn ^= 1
        first = self._group.rank() == 0
        if not first:
            _pack(shards, self._buffer(0))
        dist.barrier(self._group)
        if not first:
            return None
        # The first rank's shards need not move.
        return [list(shards), *(_unpack(shards, self._buffer(rank)) for rank in range(1, self._group.size()))]

    def _buffer(self, rank: int) -> Tensor:
        segment = self._maps[rank]
        assert segment is not None
        offset = _TOKEN_BYTES + self._turn * self._half
        return torch.frombuffer(segment, dtype=torch.uint8, count=self._half, offset=offset)


class _Offer(NamedTuple):
    """Location of a process's segment, and the characters that it begins with."""

    host: str
    path: str
    token: str


@contextlib.contextmanager
def _offered(size: int) -> Iterator[_Offer]:
    """Provide memory that processes may map inside the block; too little of it if the system denies the request."""
    token = secrets.token_hex(_TOKEN_BYTES // 2)
    descriptor = os.memfd_create("slime-like-export", os.MFD_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, size)
            os.pwrite(descriptor, token.encode(), 0)
        yield _Offer(socket.gethostname(), f"/proc/{os.getpid()}/fd/{descriptor}", token)
    finally:
        os.close(descriptor)


def _map(offer: _Offer, size: int) -> mmap.mmap | None:
    """Map a process's segment; ``None`` if it cannot be reached from here, or is too small."""
    if offer.host != socket.gethostname():
        return None
    try:
        with Path(offer.path).open("r+b", buffering=0) as file:
            segment = mmap.mmap(file.fileno(), size)
    except (OSError, ValueError):
        return None  # or a process with the same number on another machine with the same name
    return segment if segment[:_TOKEN_BYTES] == offer.token.encode() else None
