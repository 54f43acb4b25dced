"""Buckets by broadcast, over gloo (hosts) or NCCL (GPUs): one sender, any number of receivers, on any host.

The process group is an object of its own, never torch's default one, which trainer and engine use for themselves. Its
members find each other through a store that the sender serves, on the one interface it is told:

    joined            how many receivers have ever connected; each takes its number from here
    left/NUMBER       that receiver has closed
    generation/G      the numbers of the receivers that make up group G; their ranks follow that of the sender, 0
    broken/G          the sender has given that group up

The sender makes a new group when a bucket is to be sent and somebody has come or gone since the last one, or the last
one has broken: an engine that is started again just connects. After a broken group every receiver must connect anew,
since the sender cannot know which of them are still there.
"""

from __future__ import annotations

import json
import socket
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
from slime_like.system.network import address_towards
from slime_like.weights.buckets import bucket_nbytes, figures_of, read_bucket, write_bucket
from slime_like.weights.stopwatch import Stopwatch
from slime_like.weights.transport import TransportSettings
from slime_like.weights.transports.leftovers import check_session

GLOO, NCCL = "gloo", "nccl"
_CLOSE_S = 5.0
_LOOK_EVERY_S = 0.0005
_ASK_EVERY_S = 0.25
"""Between a waiting receiver's looks at whether the group is broken: gloo does not always tell all of its members."""
_JOINED = "joined"


class CollectiveSender:
    """Rank 0 of its groups. Broadcasts run in threads of their own, one after the other."""

    def __init__(self, backend: str, session: str, settings: TransportSettings) -> None:
        check_session(session)
        self._backend = backend
        self._address = settings.address
        self._timeout_s = settings.timeout_s
        self._id = f"{session}.{uuid.uuid4().hex[:12]}"
        store, self._port = _serve_store(settings.address, settings.timeout_s)
        self._open_store: dist.TCPStore | None = store
        self._buffers: list[Tensor | None] = [None, None]
        self._deliveries: dict[int, _Delivery] = {}
        self._last: _Delivery | None = None
        self._sent = 0
        self._members: list[int] = []
        self._forgotten = 0
        self._generation = 0
        self._group: _Group | None = None

    def rendezvous(self) -> dict[str, Any]:
        return {"sender": self._id, "host": self._address, "port": self._port, "timeout_s": self._timeout_s}

    def send(self, bucket: WeightBucket) -> BucketMetadata:
        """Start a broadcast of ``bucket``.

        Raises:
            WeightSyncError: two buckets are in flight already, or no receiver has connected.
        """
        if len(self._deliveries) == len(self._buffers):
            raise WeightSyncError(f"weight sync {self._id}: two buckets are in flight; release one first")
        group = self._current_group()
        data = self._buffer(bucket_nbytes(bucket))
        hashing = Stopwatch()
        entries = write_bucket(bucket, data, hashing)
        if data.is_cuda:
            torch.cuda.current_stream(data.device).synchronize()  # the broadcast's thread has a stream of its own
        delivery = _Delivery(lambda: group.broadcast(data), self._last)
        location = {
            "sender": self._id,
            "generation": self._generation,
            "number": self._sent,
            "nbytes": data.numel(),
        }
        self._deliveries[self._sent] = self._last = delivery
        self._sent += 1
        delivery.start()
        return BucketMetadata(self._backend, location, entries, figures_of(entries, hashing))

    def release(self, metadata: BucketMetadata) -> None:
        number = metadata.location["number"]
        delivery = self._deliveries.pop(number, None)
        if delivery is None:
            raise WeightSyncError(f"weight sync {self._id}: bucket {number} is not in flight, so nothing to release")
        try:
            delivery.wait(self._timeout_s)
        except (RuntimeError, OSError, TimeoutError) as error:
            if self._group is not None and metadata.location["generation"] == self._generation:
                self._give_up_group()
            raise WeightSyncError(
                f"weight sync over {self._backend}: a receiver of {self._address}:{self._port} was lost or did not "
                f"take a bucket within sync.timeout_s={self._timeout_s:g} s ({_one_line(error)}); engines must connect "
                "again"
            ) from error

    def close(self) -> None:
        self._deliveries.clear()
        self._group = self._open_store = None
        self._buffers = [None, None]

    @property
    def _store(self) -> dist.TCPStore:
        if self._open_store is None:
            raise WeightSyncError(f"weight sync {self._id}: this sender is closed")
        return self._open_store

    def _current_group(self) -> _Group:
        """The group of all receivers that are connected now; formed by the first broadcast."""
        joined = self._store.add(_JOINED, 0)
        numbers = range(self._forgotten + 1, joined + 1)
        members = [number for number in numbers if not self._store.check([f"left/{number}"])]
        if not members:
            raise WeightSyncError(
                f"weight sync over {self._backend}: no receiver is connected to {self._address}:{self._port}; connect "
                "engines before sending, and again after a failed sync"
            )
        if self._group is None or members != self._members:
            self._generation += 1
            self._members = members
            self._store.set(f"generation/{self._generation}", json.dumps(members))
            self._group = _Group(
                self._backend, self._address, self._address, self._port, self._generation, 0, len(members) + 1,
                self._timeout_s,
            )  # fmt: skip
        return self._group

    def _give_up_group(self) -> None:
        """End it, so that the others in it fail at once, too."""
        self._store.set(f"broken/{self._generation}", "")
        self._group = self._last = None
        self._forgotten = self._store.add(_JOINED, 0)

    def _buffer(self, nbytes: int) -> Tensor:
        """This turn's buffer, at least one byte of it, grown where it is too small."""
        turn, nbytes = self._sent % len(self._buffers), max(nbytes, 1)
        buffer = self._buffers[turn]
        if buffer is None or buffer.numel() < nbytes:
            self._buffers[turn] = None  # before the new one is made
            buffer = self._buffers[turn] = torch.empty(nbytes, dtype=torch.uint8, device=_device(self._backend))
        return buffer[:nbytes]


class CollectiveReceiver:
    """Joins one sender's broadcasts."""

    def __init__(self, backend: str, rendezvous: Mapping[str, Any]) -> None:
        self._backend = backend
        self._sender = str(rendezvous["sender"])
        self._host, self._port = str(rendezvous["host"]), int(rendezvous["port"])
        self._timeout_s = float(rendezvous["timeout_s"])
        self._store: dist.TCPStore | None = _join_store(self._host, self._port, self._timeout_s)
        self._number = self._store.add(_JOINED, 1)
        self._generation = 0
        self._group: _Group | None = None
        self._buffer: Tensor | None = None

    def receive(self, metadata: BucketMetadata) -> Iterator[tuple[str, Tensor]]:
        location = metadata.location
        if metadata.transport != self._backend or location["sender"] != self._sender:
            raise WeightSyncError(
                f"a {self._backend} receiver of {self._sender} was handed a {metadata.transport} bucket of "
                f"{location.get('sender')}"
            )
        data = self._buffer_of(location["nbytes"])
        try:
            group = self._group_of(location["generation"])
            group.broadcast(data, self._is_broken)
        except (RuntimeError, OSError, TimeoutError) as error:
            self._group = None
            raise WeightSyncError(
                f"weight sync over {self._backend}: sender {self._host}:{self._port}, or another receiver of it, was "
                f"lost, or sent nothing within sync.timeout_s={self._timeout_s:g} s ({_one_line(error)})"
            ) from error
        return read_bucket(metadata.entries, data)

    def close(self) -> None:
        """Tell the sender, if it is still there."""
        self._group = self._buffer = None
        store, self._store = self._store, None
        if store is not None:
            store.set_timeout(timedelta(seconds=_CLOSE_S))
            try:
                store.set(f"left/{self._number}", "")
            except (RuntimeError, OSError):  # the sender has ended first; there is nobody left to tell
                return

    def _group_of(self, generation: int) -> _Group:
        if self._store is None:
            raise WeightSyncError(f"weight sync over {self._backend}: this receiver is closed; connect again")
        if self._group is None or generation != self._generation:
            members = json.loads(self._store.get(f"generation/{generation}"))
            if self._number not in members:
                raise WeightSyncError(
                    f"weight sync over {self._backend}: this receiver is not in the sender's group; connect again"
                )
            rank, size = members.index(self._number) + 1, len(members) + 1
            own = address_towards(self._host, self._port)
            self._group = _Group(self._backend, own, self._host, self._port, generation, rank, size, self._timeout_s)
            self._generation = generation
        return self._group

    def _is_broken(self) -> bool:
        return self._store is not None and self._store.check([f"broken/{self._generation}"])

    def _buffer_of(self, nbytes: int) -> Tensor:
        if self._buffer is None or self._buffer.numel() < nbytes:
            self._buffer = None
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, device=_device(self._backend))
        return self._buffer[:nbytes]


@dataclass(slots=True)
class _Group:
    """One process group, formed when it is first used: that waits for all of its members.

    Attributes:
        own: address of the interface that this member is reached by.
        host, port: the sender's store.
    """

    backend: str
    own: str
    host: str
    port: int
    generation: int
    rank: int
    size: int
    timeout_s: float
    _group: Any = None

    def broadcast(self, data: Tensor, is_broken: Callable[[], bool] = lambda: False) -> None:
        """From rank 0 into ``data`` of all others; returns when it is there.

        Raises:
            RuntimeError, TimeoutError: a member was lost, or ``is_broken`` says so, or time ran out.
        """
        if data.is_cuda:
            torch.cuda.set_device(data.device)  # of this thread
        timeout = timedelta(seconds=self.timeout_s)
        if self._group is None:
            # A connection of its own: waiting for the others must not keep anybody from the store.
            store = _join_store(self.host, self.port, self.timeout_s)
            own_part = dist.PrefixStore(f"group/{self.generation}", store)
            self._group = _FORM[self.backend](own_part, self.rank, self.size, self.own, timeout)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, timeout
        work = self._group.broadcast([data], options)
        _wait_completed(work, self.timeout_s, is_broken)
        work.wait(timeout)  # raises what went wrong
        if self.backend == NCCL:
            torch.cuda.current_stream().synchronize()  # its ``wait`` makes a stream wait, not this thread


class _Delivery(threading.Thread):
    """One broadcast, after the one before it. A daemon, so that a receiver that never comes holds up no exit."""

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
        except BaseException as error:  # handed to whoever waits
            # Without its frames: they keep the group's connections open, for which the other members would wait.
            self._error = error.with_traceback(None)
        finally:
            self._previous = None

    def wait(self, timeout_s: float) -> None:
        self.join(timeout_s)
        if self.is_alive():
            raise TimeoutError("no end of the broadcast")
        if self._error is not None:
            raise self._error


def open_sender(name: str, session: str, settings: TransportSettings) -> CollectiveSender:
    return CollectiveSender(name, session, settings)


def open_receiver(name: str, rendezvous: Mapping[str, Any]) -> CollectiveReceiver:
    return CollectiveReceiver(name, rendezvous)


def _form_gloo(store: dist.Store, rank: int, size: int, own: str, timeout: timedelta) -> Any:
    gloo: Any = dist.ProcessGroupGloo  # torch's type stubs lack its options
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=own)]  # the one interface it listens on
    options._timeout = timeout
    return gloo(store, rank, size, options)


def _form_nccl(store: dist.Store, rank: int, size: int, _: str, timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)


_FORM: Mapping[str, Callable[[dist.Store, int, int, str, timedelta], Any]] = {GLOO: _form_gloo, NCCL: _form_nccl}


def _wait_completed(work: Any, timeout_s: float, is_broken: Callable[[], bool]) -> None:
    started = asked = time.monotonic()
    while not work.is_completed():
        now = time.monotonic()
        if now - asked > _ASK_EVERY_S:
            asked = now
            if is_broken():
                raise RuntimeError("the sender has given this group up")
        if now - started > timeout_s:
            raise TimeoutError("no end of the broadcast")
        time.sleep(_LOOK_EVERY_S)


def _device(backend: str) -> torch.device:
    return torch.device("cpu") if backend == GLOO else torch.device("cuda", torch.cuda.current_device())


def _serve_store(address: str, timeout_s: float) -> tuple[dist.TCPStore, int]:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as listener:
        listener.bind((address, 0))
        listener.listen()
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            address,
            port,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            # By itself the store would listen on every interface of the machine.
            master_listen_fd=listener.detach(),
        )
    return store, port


def _join_store(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    try:
        return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)
    except (RuntimeError, OSError) as error:
        raise WeightSyncError(
            f"weight sync: nobody serves {host}:{port} ({_one_line(error)}): the sender has ended, or the network "
            "between engine and trainer is closed"
        ) from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
