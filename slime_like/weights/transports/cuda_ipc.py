"""Buckets in GPU memory that engines on the same GPU, or on one that reaches it, map into their own address space.

The sender owns two buffers and fills them in turn. A handle is the plain values that torch's own sharing of CUDA
storages consists of; no object is unpickled. Devices are named by their UUIDs: the same GPU has another index in
a process that sees other ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from slime_like.errors import WeightSyncError
from slime_like.interfaces import BucketMetadata, WeightBucket
from slime_like.weights.buckets import bucket_nbytes, read_bucket, write_bucket
from slime_like.weights.transport import TransportSettings
from slime_like.weights.transports.leftovers import (
    buckets_in_flight,
    check_session,
    not_in_flight,
    require_transport,
)

NAME = "cuda_ipc"
_GRANULE = 1 << 21
_BYTES = (1, 4, 6)
"""Which of the values of ``_share_cuda_`` are bytes: the handles of memory, reference counter and event."""


class CudaIpcSender:
    """Fills two device buffers in turn."""

    def __init__(self, _: str, session: str, settings: TransportSettings) -> None:
        check_session(session)
        self._session = session
        self._buffers: list[_Shared | None] = [None, None]
        self._in_flight: dict[int, int] = {}
        self._sent = 0

    def rendezvous(self) -> dict[str, Any]:
        return {"sender": f"{self._session}.{_uuid(torch.cuda.current_device())}"}

    def send(self, bucket: WeightBucket) -> BucketMetadata:
        turn = self._sent % len(self._buffers)
        if turn in self._in_flight.values():
            raise buckets_in_flight(self._session)
        shared = self._buffer(turn, bucket_nbytes(bucket))
        entries, hash_s = write_bucket(bucket, shared.buffer)
        torch.cuda.current_stream().synchronize()  # receivers' streams know nothing of this one
        self._in_flight[self._sent] = turn
        location = {**self.rendezvous(), "number": self._sent, **shared.handle}
        self._sent += 1
        return BucketMetadata(NAME, location, entries, hash_s)

    def release(self, metadata: BucketMetadata) -> None:
        number = metadata.location["number"]
        if self._in_flight.pop(number, None) is None:
            raise not_in_flight(self._session, f"bucket {number}")

    def close(self) -> None:
        self._in_flight.clear()
        self._buffers = [None, None]

    def _buffer(self, turn: int, nbytes: int) -> _Shared:
        shared = self._buffers[turn]
        if shared is None or shared.buffer.numel() < nbytes:
            self._buffers[turn] = None
            rounded = -(-max(nbytes, 1) // _GRANULE) * _GRANULE
            shared = self._buffers[turn] = _Shared(torch.empty(rounded, dtype=torch.uint8, device="cuda"))
        return shared


class CudaIpcReceiver:
    """Maps the buffers that buckets name. A view must have been read, on the device, before the bucket is released."""

    def __init__(self, _: str, rendezvous: Mapping[str, Any]) -> None:
        self._mapped: dict[str, Tensor] = {}

    def receive(self, metadata: BucketMetadata) -> Iterator[tuple[str, Tensor]]:
        require_transport(metadata.transport, NAME)
        return read_bucket(metadata.entries, self._map(metadata.location))

    def close(self) -> None:
        """Mappings end with the tensors that look into them."""
        self._mapped.clear()

    def _map(self, location: Mapping[str, Any]) -> Tensor:
        """A sender has two buffers at a time: an older mapping keeps memory that it has given up."""
        key = str(location["shared"])
        if key not in self._mapped:
            self._mapped = dict(list(self._mapped.items())[-1:])
            self._mapped[key] = _open(location)
        return self._mapped[key]


class _Shared:
    """A device buffer and the handle by which others map it, taken once: torch counts the takers of each."""

    def __init__(self, buffer: Tensor) -> None:
        self.buffer = buffer
        values = buffer.untyped_storage()._share_cuda_()
        self.handle = {
            "device": _uuid(values[0]),
            "shared": [value.hex() if place in _BYTES else value for place, value in enumerate(values)],
            "nbytes": buffer.numel(),
        }


def _open(location: Mapping[str, Any]) -> Tensor:
    index = _index_of(location["device"])
    values = [bytes.fromhex(value) if place in _BYTES else value for place, value in enumerate(location["shared"])]
    storage = torch.UntypedStorage._new_shared_cuda(index, *values[1:])
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (location["nbytes"],), (1,))


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _index_of(uuid: str) -> int:
    for index in range(torch.cuda.device_count()):
        if _uuid(index) == uuid:
            return index
    raise WeightSyncError(
        f"the weights are on GPU {uuid}, which this engine's process does not see",
        code="gpu-unseen",
        remedy="use sync.transport: shared_memory",
    )
