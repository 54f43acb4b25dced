"""Buckets by broadcast between hosts, over gloo or NCCL.

The process group is a separate object, never torch's default group, which trainers and engines use themselves. Members
find each other through a store that the sender serves on one given interface. Names in it begin with a random key:

    joined            number of receivers that ever connected; each takes its number from here
    left/NUMBER       this receiver has closed
    generation/G      numbers of the receivers in group G; their ranks follow the sender's rank, 0
    broken/G          the sender has given up this group

Before a bucket, the sender forms a new group if receivers have joined or left, or if the last group broke. So a
restarted engine simply connects. After a broken group every receiver must connect again, because the sender cannot know
which ones are still alive.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime_like.errors import WeightSyncError
from slime_like.interfaces import BucketMetadata, WeightBucket
from slime_like.system.network import address_towards, listen
from slime_like.weights.transport import TransportSettings, bucket_nbytes, read_bucket, write_bucket
from slime_like.weights.transports.names import buckets_in_flight, check_session

GLOO, NCCL = "gloo", "nccl"
_LOOK_EVERY_S = 0.0005
_WATCHDOG_AFTER = timedelta(days=1)
_ASK_EVERY_S = 0.25
"""Time between a waiting receiver's checks for a broken group. Gloo doesn't report it to every member."""


@dataclass(slots=True)
class BroadcastGroup:
    """A process group. The first use forms it, which waits for all members. This member listens on the interface
    ``own``, and meets the others in the sender's store, under names that begin with ``key``."""

    backend: str
    own: str
    host: str
    port: int
    key: str
    generation: int
    rank: int
    size: int
    timeout_s: float
    _group: Any = None

    def broadcast(self, data: Tensor, is_broken: Callable[[], bool] = lambda: False) -> None:
        """Copy rank 0's ``data`` into every other member's ``data``; return when it has arrived.

        Raises:
            RuntimeError, TimeoutError: a member was lost, ``is_broken`` returned true, or time ran out.
        """
        timeout = timedelta(seconds=self.timeout_s)
        try:
            if data.is_cuda:
                torch.cuda.set_device(data.device)  # for this thread
            if self._group is None:
                self._group = self._form(timeout)
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor, options.timeout = 0, 0, timeout
            work = self._group.broadcast([data], options)
            _wait_completed(work, self.timeout_s, is_broken)
            work.wait(timeout)  # raises the error, if any
            if self.backend == NCCL:
                torch.cuda.current_stream().synchronize()  # ``wait`` blocks only a stream, not this thread
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """End running operations and close connections. Otherwise NCCL's kernel would wait on the device forever."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _form(self, timeout: timedelta) -> Any:
        # A separate connection, because waiting for the others must not block other users of the store.
        store = join_store(self.host, self.port, self.key, self.timeout_s)
        own_part = dist.PrefixStore(f"group/{self.generation}", store)
        if self.backend == NCCL:
            options = dist.ProcessGroupNCCL.Options()
            # The bound is ours: torch's watchdog would end the process (TORCH_NCCL_ASYNC_ERROR_HANDLING).
            options._timeout = timeout + _WATCHDOG_AFTER
            return dist.ProcessGroupNCCL(own_part, self.rank, self.size, options)
        gloo: Any = dist.ProcessGroupGloo  # torch's type stubs lack the options
        gloo_options = gloo._Options()
        gloo_options._devices = [gloo.create_device(hostname=self.own)]  # listen on this interface only
        gloo_options._timeout = timeout
        return gloo(own_part, self.rank, self.size, gloo_options)


def _wait_completed(work: Any, timeout_s: float, is_broken: Callable[[], bool]) -> None:
    started = asked = time.monotonic()
    while not work.is_completed():
        now = time.monotonic()
        if now - asked > _ASK_EVERY_S:
            asked = now
            if is_broken():
                raise RuntimeError("the sender has given up this group")
        if now - started > timeout_s:
            raise TimeoutError("the broadcast did not end")
        time.sleep(_LOOK_EVERY_S)


def serve_store(address: str, key: str, timeout_s: float) -> tuple[dist.Store, int]:
    """Return a store and its port. A stranger can list its keys, but can't take a place by guessing names."""
    with listen(address, 0) as listener:
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            address,
            port,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            # By default, the store would listen on every interface of the machine.
            master_listen_fd=listener.detach(),
        )
    return dist.PrefixStore(key, store), port


def join_store(host: str, port: int, key: str, timeout_s: float) -> dist.Store:
    try:
        timeout = timedelta(seconds=timeout_s)
        store = dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)
        return dist.PrefixStore(key, store)
    except (RuntimeError, OSError) as error:
        raise WeightSyncError(
            f"no sender listens on {host}:{port} ({one_line(error)}): the sender has ended, or the network between "
            "engine and trainer is closed",
            code="no-sender",
            who="weight sync",
        ) from error


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


_CLOSE_S = 5.0
_JOINED = "joined"


class _Receivers:
    """The receivers of one sender: the store, who has joined and left, and their current group.

    Attributes:
        generation: number of the group, which every bucket names.
        key: random prefix of all keys in the store.
    """

    def __init__(self, backend: str, settings: TransportSettings) -> None:
        self._backend, self._settings = backend, settings
        self.key = secrets.token_hex(16)
        self._store, self.port = serve_store(settings.address, self.key, settings.timeout_s)
        self._members: list[int] = []
        self._forgotten = 0
        self.generation = 0
        self._group: BroadcastGroup | None = None

    @property
    def place(self) -> str:
        return f"{self._settings.address}:{self.port}"

    def group(self) -> BroadcastGroup:
        """Return the group of all currently connected receivers. The first broadcast forms it."""
        joined = self._store.add(_JOINED, 0)
        numbers = range(self._forgotten + 1, joined + 1)
        members = [number for number in numbers if not self._store.check([f"left/{number}"])]
        if not members:
            raise WeightSyncError(
                f"no receiver is connected to {self.place}",
                code="no-receiver",
                who=f"weight sync over {self._backend}",
                remedy="connect engines before sending, and again after a failed sync",
            )
        if self._group is None or members != self._members:
            self.generation += 1
            self._members = members
            self._store.set(f"generation/{self.generation}", json.dumps(members))
            host, size, timeout_s = self._settings.address, len(members) + 1, self._settings.timeout_s
            place = (host, host, self.port, self.key)
            self._group = BroadcastGroup(self._backend, *place, self.generation, 0, size, timeout_s)
        return self._group

    def give_up(self, generation: int) -> None:
        """End this group if it is the current one, so its other members fail immediately, too."""
        if self._group is None or generation != self.generation:
            return
        self._store.set(f"broken/{self.generation}", "")
        self._group.abort()
        self._group = None
        self._forgotten = self._store.add(_JOINED, 0)


class CollectiveSender:
    """Rank 0 of its groups. Broadcasts run in threads, one after the other."""

    def __init__(self, backend: str, session: str, settings: TransportSettings) -> None:
        check_session(session)
        self._backend, self._settings = backend, settings
        self._id = f"{session}.{uuid.uuid4().hex[:12]}"
        self._open: _Receivers | None = _Receivers(backend, settings)
        self._buffers: list[Tensor | None] = [None, None]
        self._deliveries: dict[int, _Delivery] = {}
        self._last: _Delivery | None = None
        self._sent = 0

    def rendezvous(self) -> dict[str, Any]:
        place = {"host": self._settings.address, "port": self._receivers.port, "key": self._receivers.key}
        return {"sender": self._id, **place, "timeout_s": self._settings.timeout_s}

    def send(self, bucket: WeightBucket) -> BucketMetadata:
        """Start a broadcast of ``bucket``.

        Raises:
            WeightSyncError: two buckets are already in flight, or no receiver has connected.
        """
        if len(self._deliveries) == len(self._buffers):
            raise buckets_in_flight(self._id)
        group = self._receivers.group()
        data = self._buffer(bucket_nbytes(bucket))
        entries, hash_s = write_bucket(bucket, data)
        if data.is_cuda:
            torch.cuda.current_stream(data.device).synchronize()  # the broadcast thread has a separate stream
        delivery = _Delivery(lambda: group.broadcast(data), self._last)
        location = {
            "sender": self._id,
            "generation": self._receivers.generation,
            "number": self._sent,
            "nbytes": data.numel(),
        }
        self._deliveries[self._sent] = self._last = delivery
        self._sent += 1
        delivery.start()
        return BucketMetadata(self._backend, location, entries, hash_s)

    def release(self, metadata: BucketMetadata) -> None:
        number, generation = metadata.location["number"], metadata.location["generation"]
        delivery = self._deliveries.pop(number)
        receivers, turn = self._receivers, number % len(self._buffers)
        try:
            delivery.wait(self._settings.timeout_s)
        except (RuntimeError, OSError, TimeoutError) as error:
            if generation == receivers.generation:
                self._last = None
            receivers.give_up(generation)
            raise WeightSyncError(
                f"a receiver of {receivers.place} was lost, or did not receive a bucket within "
                f"sync.timeout_s={self._settings.timeout_s:g} s ({one_line(error)})",
                code="receiver-lost",
                who=f"weight sync over {self._backend}",
                remedy="engines must connect again",
            ) from error
        finally:
            buffer = self._buffers[turn]
            if buffer is not None and buffer.numel() > self._settings.keep_nbytes:
                self._buffers[turn] = None

    def rest(self) -> None:
        self._buffers = [None, None]

    def close(self) -> None:
        self._deliveries.clear()
        self._open = None
        self._buffers = [None, None]

    @property
    def _receivers(self) -> _Receivers:
        if self._open is None:
            raise WeightSyncError("this sender is closed", code="sender-closed", who=f"weight sync {self._id}")
        return self._open

    def _buffer(self, nbytes: int) -> Tensor:
        """Return this turn's buffer with at least one byte, enlarged if it is too small."""
        turn, nbytes = self._sent % len(self._buffers), max(nbytes, 1)
        buffer = self._buffers[turn]
        if buffer is None or buffer.numel() < nbytes:
            self._buffers[turn] = None  # free it before making the new one
            buffer = self._buffers[turn] = torch.empty(nbytes, dtype=torch.uint8, device=_device(self._backend))
        return buffer[:nbytes]


class CollectiveReceiver:
    """Member of one sender's broadcasts."""

    def __init__(self, backend: str, rendezvous: Mapping[str, Any], worker: int) -> None:
        self._backend = backend
        self._sender = str(rendezvous["sender"])
        self._host, self._port = str(rendezvous["host"]), int(rendezvous["port"])
        self._key, self._timeout_s = str(rendezvous["key"]), float(rendezvous["timeout_s"])
        self._store: dist.Store | None = join_store(self._host, self._port, self._key, self._timeout_s)
        self._number = self._store.add(_JOINED, 1)
        self._generation = 0
        self._group: BroadcastGroup | None = None
        self._buffer: Tensor | None = None

    def receive(self, metadata: BucketMetadata) -> Iterator[tuple[str, Tensor]]:
        location = metadata.location
        if location["sender"] != self._sender:
            problem = f"a receiver of {self._sender} received a bucket of {location['sender']}"
            raise WeightSyncError(problem, code="foreign-bucket")
        nbytes = location["nbytes"]
        if self._buffer is None or self._buffer.numel() < nbytes:
            self._buffer = None  # free it before making the new one
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, device=_device(self._backend))
        data = self._buffer[:nbytes]
        try:
            group = self._group_of(location["generation"])
            broken = f"broken/{self._generation}"
            group.broadcast(data, lambda: self._store is not None and self._store.check([broken]))
        except (RuntimeError, OSError, TimeoutError) as error:
            self._group = None
            raise WeightSyncError(
                f"sender {self._host}:{self._port} or another receiver was lost, or sent nothing within "
                f"sync.timeout_s={self._timeout_s:g} s ({one_line(error)})",
                code="sender-lost",
                who=f"weight sync over {self._backend}",
            ) from error
        return read_bucket(metadata.entries, data)

    def rest(self) -> None:
        self._buffer = None

    def close(self) -> None:
        """Leave a notice for the sender, if it is still alive."""
        self._group = self._buffer = None
        store, self._store = self._store, None
        if store is not None:
            store.set_timeout(timedelta(seconds=_CLOSE_S))
            try:
                store.set(f"left/{self._number}", "")
            except (RuntimeError, OSError):  # the sender ended first, so it needs no notice
                return

    def _group_of(self, generation: int) -> BroadcastGroup:
        if self._store is None:
            raise self._disconnected("this receiver is closed")
        if self._group is None or generation != self._generation:
            members = json.loads(self._store.get(f"generation/{generation}"))
            if self._number not in members:
                raise self._disconnected("this receiver is not in the sender's group")
            rank, size = members.index(self._number) + 1, len(members) + 1
            place = (address_towards(self._host, self._port), self._host, self._port, self._key)
            self._group = BroadcastGroup(self._backend, *place, generation, rank, size, self._timeout_s)
            self._generation = generation
        return self._group

    def _disconnected(self, problem: str) -> WeightSyncError:
        who = f"weight sync over {self._backend}"
        return WeightSyncError(problem, code="disconnected", who=who, remedy="connect again")


class _Delivery(threading.Thread):
    """One broadcast, run after the previous one. A daemon, so a receiver that never comes cannot block exit."""

    def __init__(self, broadcast: Callable[[], None], previous: _Delivery | None) -> None:
        super().__init__(name="weight-broadcast", daemon=True)
        self._broadcast = broadcast
        self._previous = previous
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            if self._previous is not None:
                self._previous.join()
                self._error = self._previous._error
            if self._error is None:
                self._broadcast()
        except BaseException as error:  # raised again by ``wait``
            # Drop the frames: they keep the group's connections open, and the other members would wait for those.
            self._error = error.with_traceback(None)
        finally:
            self._previous = None

    def wait(self, timeout_s: float) -> None:
        self.join(timeout_s)
        if self.is_alive():
            raise TimeoutError("the broadcast did not end")
        if self._error is not None:
            raise self._error


def _device(backend: str) -> torch.device:
    return torch.device("cpu") if backend == GLOO else torch.device("cuda", torch.cuda.current_device())
