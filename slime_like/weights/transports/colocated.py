"""Buckets that engine workers map from the trainer rank on the same device.

The first rank of a pipeline stage gathers a bucket. All ranks, also on other hosts, receive it through the trainers'
collectives (NCCL or gloo). Each rank holds it in memory that the worker on its device can map: GPU memory (CUDA IPC),
or shared memory on a CPU. So every byte reaches a device once, however many engines there are. Stages send one after
the other, so a rank holds at most two buckets.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime_like.errors import WeightSyncError
from slime_like.interfaces import BucketMetadata, WeightBucket
from slime_like.system.json_collectives import all_gather_json
from slime_like.weights.transport import TransportSettings, bucket_nbytes, gpu_uuid, read_bucket, write_bucket
from slime_like.weights.transports.names import buckets_in_flight, check_session
from slime_like.weights.transports.shared_memory import SegmentMap, SharedSegment, new_segments

NAME = "colocated"
_GRANULE = 1 << 21
_BYTES = (1, 4, 6)
"""Positions of the ``_share_cuda_`` values that are bytes: the handles of memory, reference counter and event."""


@dataclass(frozen=True, slots=True)
class DevicePlace:
    """Device of a rank or worker: its host's name, and a GPU's UUID or a CPU slot's number."""

    node: str
    device: str

    @classmethod
    def of_this_process(cls, slot: int) -> DevicePlace:
        """Return the current GPU. On a CPU, ranks are numbered slots, and a colocated worker uses one rank's slot."""
        device = gpu_uuid(torch.cuda.current_device()) if torch.cuda.is_available() else f"CPU slot {slot}"
        return cls(socket.gethostname(), device)

    def __str__(self) -> str:
        return f"{self.device} of {self.node}"


def rank_on(own: DevicePlace, ranks: Sequence[DevicePlace]) -> int:
    """Return the index of the trainer rank on a worker's device.

    Raises:
        WeightSyncError: no rank is there, or several are.
    """
    found = [index for index, place in enumerate(ranks) if place == own]
    if len(found) == 1:
        return found[0]
    problem = f"trainer ranks {', '.join(map(str, found))} are all on {own}"
    if not found:
        problem = f"no trainer rank is on {own}, where an engine's worker is"
    remedy = "use sync.transport: shared_memory, or gloo between hosts"
    raise WeightSyncError(problem, code="unpaired", who="weight sync between colocated processes", remedy=remedy)


class DeviceMemory:
    """A buffer on the current device that another process on the same GPU maps (CUDA IPC).

    Its handle is taken once, because torch counts the users of each handle. It consists of the plain values in torch's
    sharing of CUDA storages; no object is unpickled. It names the device by UUID, because a GPU's index differs between
    processes that see different GPUs.

    Attributes:
        buffer: (n,) uint8.
        handle: plain values.
    """

    def __init__(self, nbytes: int) -> None:
        self.buffer = torch.empty(-(-max(nbytes, 1) // _GRANULE) * _GRANULE, dtype=torch.uint8, device="cuda")
        values = self.buffer.untyped_storage()._share_cuda_()
        self.handle = {
            "device": gpu_uuid(values[0]),
            "shared": [value.hex() if place in _BYTES else value for place, value in enumerate(values)],
            "nbytes": self.buffer.numel(),
        }

    @staticmethod
    def map(handle: Mapping[str, Any]) -> Tensor:
        """Map the buffer of ``handle``, (n,) uint8. The mapping ends with the last tensor that views it.

        Raises:
            WeightSyncError: the GPU is not this process's current one.
        """
        index = torch.cuda.current_device()
        if gpu_uuid(index) != handle["device"]:
            raise WeightSyncError(
                f"the weights are on GPU {handle['device']}, and this worker computes on {gpu_uuid(index)}",
                code="gpu-unseen",
                remedy="use sync.transport: shared_memory, or gloo between hosts",
            )
        values = [bytes.fromhex(value) if place in _BYTES else value for place, value in enumerate(handle["shared"])]
        storage = torch.UntypedStorage._new_shared_cuda(index, *values[1:])
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 0, (handle["nbytes"],), (1,))

    @staticmethod
    def collect() -> None:
        """Free dropped buffers that other processes no longer map."""
        torch.cuda.ipc_collect()


class ColocatedSender:
    """The sender on every trainer rank. All ranks create and use it together. Fills two buffers in turn."""

    def __init__(self, _: str, session: str, settings: TransportSettings) -> None:
        check_session(session)
        self._session = session
        self._rank, self._num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._stage, self._keep_nbytes = settings.stage, settings.keep_nbytes
        own = settings.stage if settings.gathers else None
        stages = [own] if self._num_ranks == 1 else all_gather_json(own, _collective_device())
        gathering = sorted((stage, rank) for rank, stage in enumerate(stages) if stage is not None)
        self._senders = [rank for _, rank in gathering]
        self._new_memory: Callable[[int], SharedSegment | DeviceMemory] = new_segments(session)
        if torch.cuda.is_available():
            self._new_memory = DeviceMemory
        self._memory: list[SharedSegment | DeviceMemory | None] = [None, None]
        self._in_flight: dict[int, int] = {}
        self._sent = 0

    def rendezvous(self) -> dict[str, Any]:
        place = DevicePlace.of_this_process(self._rank)
        return {"sender": self._session, "rank": self._rank, "node": place.node, "device": place.device}

    def stream(self, gather: Callable[[], WeightBucket | None]) -> Iterator[BucketMetadata]:
        """Yield the buckets of all stages; every rank gets all of them. Collective over the trainer's world.

        Args:
            gather: called on all ranks of a stage during that stage's turn, until its first rank has no more buckets.
        """
        for stage, sender in enumerate(self._senders):
            while (sent := self._pass_on(gather() if stage == self._stage else None, sender)) is not None:
                yield sent

    def send(self, bucket: WeightBucket) -> BucketMetadata:
        """Send from the only rank."""
        sent = self._pass_on(bucket, self._rank)
        assert sent is not None
        return sent

    def release(self, metadata: BucketMetadata) -> None:
        turn = self._in_flight.pop(metadata.location["number"])
        memory = self._memory[turn]
        if isinstance(memory, DeviceMemory) and memory.buffer.numel() > self._keep_nbytes:
            self._memory[turn] = None

    def rest(self) -> None:
        """Free GPU memory. Memory that workers still map is freed when they unmap it."""
        for turn, memory in enumerate(self._memory):
            if isinstance(memory, DeviceMemory):
                self._memory[turn] = None
        if torch.cuda.is_available():
            DeviceMemory.collect()

    def close(self) -> None:
        for memory in self._memory:
            if isinstance(memory, SharedSegment):
                memory.remove()
        self._memory = [None, None]
        self._in_flight.clear()

    def _pass_on(self, bucket: WeightBucket | None, sender: int) -> BucketMetadata | None:
        """Pass rank ``sender``'s bucket to all ranks; return ``None`` if it has none.

        Only the sender's metadata has entries. Each rank's metadata names its memory; ``join_buckets`` merges them.
        """
        turn = self._sent % len(self._memory)
        if turn in self._in_flight.values():
            raise buckets_in_flight(self._session)
        nbytes = -1 if bucket is None else bucket_nbytes(bucket)
        if self._num_ranks > 1:
            size = torch.tensor([nbytes], device=_collective_device())
            dist.broadcast(size, sender)
            nbytes = int(size)
        if nbytes < 0:
            return None
        memory = self._memory[turn]
        if memory is None or memory.buffer.numel() < nbytes:
            self._memory[turn] = None
            if isinstance(memory, SharedSegment):
                memory.remove()
            memory = None  # freed before the larger buffer is made
            if torch.cuda.is_available():
                DeviceMemory.collect()
            memory = self._memory[turn] = self._new_memory(nbytes)
        # Other ranks have no bucket, and hold what they receive.
        entries, hash_s = ((), 0.0) if bucket is None else write_bucket(bucket, memory.buffer)
        if self._num_ranks > 1:
            dist.broadcast(memory.buffer[:nbytes], sender)
        if memory.buffer.is_cuda:
            torch.cuda.current_stream().synchronize()  # workers' streams don't wait for this one
        self._in_flight[self._sent] = turn
        location = {"sender": self._session, "number": self._sent, "held": [{"rank": self._rank, **memory.handle}]}
        self._sent += 1
        return BucketMetadata(NAME, location, entries, hash_s)


def _collective_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class ColocatedReceiver:
    """Receiver that maps its device's trainer rank's memory. Read the views before the bucket is released.

    Args:
        worker: number of this worker in its engine.
    """

    def __init__(self, _: str, rendezvous: Mapping[str, Any], worker: int) -> None:
        ranks = rendezvous.get("senders", [rendezvous])
        self._session = str(ranks[0]["sender"])
        own = DevicePlace.of_this_process(rendezvous.get("first_rank", 0) + worker)
        self._rank: int = ranks[rank_on(own, [DevicePlace(rank["node"], rank["device"]) for rank in ranks])]["rank"]
        self._segments = SegmentMap(self._session)
        self._mapped: dict[int, tuple[str, Tensor]] = {}

    def receive(self, metadata: BucketMetadata) -> Iterator[tuple[str, Tensor]]:
        location = metadata.location
        if location["sender"] != self._session:
            problem = f"a receiver of {self._session} received a bucket of {location['sender']}"
            raise WeightSyncError(problem, code="foreign-bucket")
        (own,) = [held for held in location["held"] if held["rank"] == self._rank]
        if "shared" not in own:
            return read_bucket(metadata.entries, self._segments.open(own))
        turn, key = location["number"] % 2, str(own["shared"])
        if turn not in self._mapped or self._mapped[turn][0] != key:
            self._mapped.pop(turn, None)  # unmap the buffer that this one replaced
            self._mapped[turn] = key, DeviceMemory.map(own)
        return read_bucket(metadata.entries, self._mapped[turn][1])

    def rest(self) -> None:
        """Unmap GPU memory, so the rank can free it."""
        self._mapped.clear()

    def close(self) -> None:
        """Drop the mappings. Each ends with the last tensor that views it."""
        self._mapped.clear()
        self._segments.clear()
