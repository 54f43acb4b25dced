"""Shards of many parameters on their way to the rank that puts them together: one exchange for a whole batch."""

import contextlib
import mmap
import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

_ALIGNMENT = 64
_TOKEN_BYTES = 64


class Gather(Protocol):
    """Collects from all ranks of one group."""

    def __call__(self, shards: Sequence[Tensor]) -> list[list[Tensor]] | None:
        """Every rank's shards, by rank, on the group's first rank; ``None`` on the others. Collective.

        What came with one call is valid until the next one.
        """


def packed_bytes(shards: Sequence[Tensor]) -> int:
    """Room that a batch takes."""
    return sum(_room(shard) for shard in shards)


def open_gather(group: dist.ProcessGroup | None, nbytes: int, device: torch.device) -> Gather:
    """What moves batches of at most ``nbytes`` within ``group`` fastest. Opening it is collective over the group.

    Ranks on one host's CPU read each other's memory, which is freed with the gather and the tensors that it returned;
    all others exchange messages.
    """
    if group is None or group.size() == 1:
        return _alone
    if device.type == "cpu":
        shared = _Segments(group, nbytes)
        if shared.everyone_sees:
            return shared.gather
    return _Messages(group).gather


def _alone(shards: Sequence[Tensor]) -> list[list[Tensor]] | None:
    return [list(shards)]


def _room(shard: Tensor) -> int:
    return -(-shard.nbytes // _ALIGNMENT) * _ALIGNMENT


def _pack(shards: Sequence[Tensor], buffer: Tensor) -> None:
    for view, shard in zip(_unpack(shards, buffer), shards, strict=True):
        view.copy_(shard)


def _unpack(like: Sequence[Tensor], buffer: Tensor) -> list[Tensor]:
    """Views of ``buffer``, (n,) uint8, with the types and shapes of ``like``, one behind the other."""
    views, offset = [], 0
    for shard in like:
        views.append(buffer[offset : offset + shard.nbytes].view(shard.dtype).view(shard.shape))
        offset += _room(shard)
    return views


class _Messages:
    """One gather of the process group's backend."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def gather(self, shards: Sequence[Tensor]) -> list[list[Tensor]] | None:
        packed = torch.empty(packed_bytes(shards), dtype=torch.uint8, device=shards[0].device)
        _pack(shards, packed)
        if self._group.rank() > 0:
            dist.gather(packed, None, group=self._group, group_dst=0)
            return None
        everyones = [torch.empty_like(packed) for _ in range(self._group.size())]
        dist.gather(packed, everyones, group=self._group, group_dst=0)
        return [_unpack(shards, buffer) for buffer in everyones]


class _Segments:
    """Memory of every other rank that the first rank maps, in two halves that are filled in turn.

    A rank fills a half, then all meet, then the first one reads it while the others fill the next half. At the next
    meeting it is done with the first, which may be filled again. The memory has no name in the file system: it is gone
    with the last process that maps it, however that ends.

    Attributes:
        everyone_sees: the first rank could map every segment; the same on all ranks.
    """

    def __init__(self, group: dist.ProcessGroup, nbytes: int) -> None:
        self._group = group
        self._half = -(-nbytes // _ALIGNMENT) * _ALIGNMENT
        self._turn = 0
        size, first = _TOKEN_BYTES + 2 * self._half, group.rank() == 0
        with _segment(size) as (mine, offer):
            offers = [offer] * group.size()
            dist.all_gather_object(offers, offer, group=group)
            self._maps = [mine, *(_map(other, size) for other in offers[1:])] if first else [mine]
            answers = [False] * group.size()
            dist.all_gather_object(answers, all(segment is not None for segment in self._maps), group=group)
        self.everyone_sees = all(answers)

    def gather(self, shards: Sequence[Tensor]) -> list[list[Tensor]] | None:
        self._turn ^= 1
        first = self._group.rank() == 0
        if not first:
            _pack(shards, self._buffer(0))
        dist.barrier(self._group)
        if not first:
            return None
        # The first rank's own shards need not move at all.
        return [list(shards), *(_unpack(shards, self._buffer(rank)) for rank in range(1, self._group.size()))]

    def _buffer(self, rank: int) -> Tensor:
        segment = self._maps[rank]
        assert segment is not None
        offset = _TOKEN_BYTES + self._turn * self._half
        return torch.frombuffer(segment, dtype=torch.uint8, count=self._half, offset=offset)


@dataclass(frozen=True, slots=True)
class _Offer:
    """Where a process' segment can be found, and by what it is known."""

    host: str
    pid: int
    descriptor: int
    token: bytes


@contextlib.contextmanager
def _segment(size: int) -> Iterator[tuple[mmap.mmap | None, _Offer]]:
    """Memory that others may map inside the block; ``None`` where the system grants none."""
    token = secrets.token_bytes(_TOKEN_BYTES)
    descriptor = os.memfd_create("slime-like-export", os.MFD_CLOEXEC)
    try:
        yield _mapped(descriptor, size, token), _Offer(socket.gethostname(), os.getpid(), descriptor, token)
    finally:
        os.close(descriptor)


def _mapped(descriptor: int, size: int, token: bytes) -> mmap.mmap | None:
    try:
        os.ftruncate(descriptor, size)
        segment = mmap.mmap(descriptor, size)
    except OSError:
        return None
    segment[:_TOKEN_BYTES] = token
    return segment


def _map(offer: _Offer, size: int) -> mmap.mmap | None:
    """Another process' segment; ``None`` if it cannot be reached from here."""
    if offer.host != socket.gethostname():
        return None
    try:
        found = os.open(f"/proc/{offer.pid}/fd/{offer.descriptor}", os.O_RDWR)
    except OSError:
        return None
    try:
        segment = mmap.mmap(found, size)
    except (OSError, ValueError):
        return None  # a process of the same number on another machine of the same name
    finally:
        os.close(found)
    return segment if segment[:_TOKEN_BYTES] == offer.token else None
