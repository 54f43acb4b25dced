"""Broadcasts between processes: joining, losing members, and errors; and buckets in shared or device memory.

Without GPUs, only gloo runs. NCCL differs only in forming the group and waiting for the device.
"""

import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from slime_like.errors import WeightSyncError
from slime_like.interfaces import BucketMetadata, WeightBucket
from slime_like.weights.checksums import tensor_checksum
from slime_like.weights.transport import Sender, TransportSettings
from slime_like.weights.transports.registry import join_rendezvous, open_receiver, open_sender
from tests.process.conftest import in_a_fork
from tests.support.forks import clean_forks
from tests.support.weight_buckets import bucket, left, refused

SESSION = "collective-test"
TIMEOUT_S = 20.0


def new_sender(timeout_s: float = TIMEOUT_S, address: str = "127.0.0.1", transport: str = "gloo") -> Sender:
    return open_sender(transport, SESSION, TransportSettings(address=address, timeout_s=timeout_s))


class Engine:
    """A receiver in a separate process that is controlled through a pipe.

    Forked from a clean server, because forks of this process, which has threads, may hang. With a device, it is a new
    interpreter.
    """

    def __init__(self, rendezvous: dict[str, Any], transport: str = "gloo") -> None:
        context: Any = clean_forks() if transport == "gloo" else multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, rendezvous, transport), daemon=True)
        self.process.start()
        theirs.close()
        assert self.answer() == "connected"

    def tell(self, metadata: BucketMetadata) -> None:
        self._connection.send(metadata)

    def call(self, method: str) -> None:
        """Call a method of the receiver without arguments."""
        self._connection.send(method)
        assert self.answer() == method

    def answer(self) -> Any:
        assert self._connection.poll(120), "the receiver does not answer"
        return self._connection.recv()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def _serve(connection: Connection, rendezvous: dict[str, Any], transport: str) -> None:
    torch.set_num_threads(1)
    if transport == "nccl":
        torch.cuda.set_device(1)
    receiver = open_receiver(transport, rendezvous)
    connection.send("connected")
    while True:
        message = connection.recv()
        if message in ("close", "rest"):
            getattr(receiver, message)()
            connection.send(message)
            continue
        try:
            connection.send([(name, tensor_checksum(tensor)) for name, tensor in receiver.receive(message)])
        except WeightSyncError as error:
            connection.send(error)


Start = Callable[..., Engine]


@pytest.fixture
def engines() -> Iterator[Start]:
    started: list[Engine] = []

    def start(*arguments: Any) -> Engine:
        started.append(Engine(*arguments))
        return started[-1]

    yield start
    for engine in started:
        engine.kill()


def checksums(weights: WeightBucket) -> list[tuple[str, int]]:
    return [(name, tensor_checksum(tensor)) for name, tensor in weights.tensors]


def deliver(sender: Sender, receivers: list[Engine], sent: WeightBucket) -> None:
    metadata = sender.send(sent)
    for receiver in receivers:
        receiver.tell(metadata)
    for receiver in receivers:
        assert receiver.answer() == checksums(sent)
    sender.release(metadata)


def test_one_sender_and_many_receivers(engines: Start) -> None:
    sender = new_sender()
    here = [engines(sender.rendezvous()) for _ in range(2)]
    for seed, elements in enumerate((10, 300_000, 10)):
        deliver(sender, here, bucket(seed, elements))
    here.append(engines(sender.rendezvous()))
    for engine in here:
        engine.call("rest")
    sender.rest()
    deliver(sender, here, bucket(3))
    here.pop(0).call("close")
    deliver(sender, here, bucket(4))
    sender.close()
    assert not dist.is_initialized()  # torch's default group is not used


@pytest.mark.parametrize(
    ("transport", "gpus"),
    [("gloo", 0), *(pytest.param(*case, marks=pytest.mark.gpu) for case in (("nccl", 2), ("colocated", 1)))],
)
def test_two_buckets_in_flight(engines: Start, transport: str, gpus: int) -> None:
    """Buckets grow. This test has never run on GPUs."""
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} GPUs")

    def weights(seed: int) -> WeightBucket:
        device = "cuda" if gpus else "cpu"
        elements = (1000, 1000, 2000, 300_000, 10, 5000)[seed]
        return WeightBucket([(name, tensor.to(device)) for name, tensor in bucket(seed, elements).tensors])

    sender = new_sender(transport=transport)
    engine = engines(sender.rendezvous(), transport)
    ahead = sender.send(weights(0))
    for seed in range(1, 6):
        following = sender.send(weights(seed))
        with refused("buckets-in-flight"):
            sender.send(weights(5))
        engine.tell(ahead)
        assert engine.answer() == checksums(weights(seed - 1))
        sender.release(ahead)
        ahead = following
    engine.tell(ahead)
    assert engine.answer() == checksums(weights(5))
    sender.release(ahead)
    sender.close()
    sender.close()


def listening(pid: int) -> set[tuple[str, int]]:
    """Return the addresses and ports where a process listens."""
    places = (c.laddr for c in psutil.Process(pid).net_connections("tcp") if c.status == "LISTEN")
    return {(place.ip, place.port) for place in places}


def test_several_senders_of_one_session(engines: Start) -> None:
    """Like pipeline stages, and also on another address of this host."""
    before = listening(os.getpid())  # from other tests
    senders = [new_sender(), new_sender(address="127.0.0.2")]
    engine = engines(join_rendezvous([sender.rendezvous() for sender in senders]))
    buckets = [bucket(seed) for seed in range(2)]
    sent = [sender.send(weights) for sender, weights in zip(senders, buckets, strict=True)]
    for metadata, weights in zip(reversed(sent), reversed(buckets), strict=True):  # in any order
        engine.tell(metadata)
        assert engine.answer() == checksums(weights)
    for places in (listening(os.getpid()) - before, listening(engine.process.pid)):  # only on the given addresses
        assert places and all(address.startswith("127.") for address, _ in places)
    for sender, metadata in zip(senders, sent, strict=True):
        sender.release(metadata)
        sender.close()


def test_dead_receiver_is_reported_and_replaced(engines: Start) -> None:
    sender = new_sender()
    victim, witness = engines(sender.rendezvous()), engines(sender.rendezvous())
    deliver(sender, [victim, witness], bucket(0))
    metadata = sender.send(bucket(1, 30_000_000))  # larger than any socket buffer
    behind = sender.send(bucket(2))
    victim.kill()
    witness.tell(metadata)
    with refused("receiver-lost"):
        sender.release(metadata)
    assert isinstance(witness.answer(), WeightSyncError)
    with refused("no-receiver"):
        sender.send(bucket(2))
    replaced = [engines(sender.rendezvous()) for _ in range(2)]
    deliver(sender, replaced, bucket(3))
    with refused("receiver-lost"):
        sender.release(behind)
    deliver(sender, replaced, bucket(4))  # the new group is independent of the broken one
    sender.close()


def test_wait_for_a_receiver_is_bounded(engines: Start) -> None:
    sender = new_sender(timeout_s=3.0)
    engines(sender.rendezvous())
    metadata = sender.send(bucket(0))
    started = time.monotonic()
    with refused("receiver-lost"):
        sender.release(metadata)
    assert time.monotonic() - started < 15
    sender.close()


def _send_two(connection: Connection) -> None:
    sender = new_sender()
    connection.send(sender.rendezvous())
    connection.recv()
    for seed in range(2):
        connection.send(sender.send(bucket(seed)))
        connection.recv()


def test_dead_sender_is_reported(engines: Start) -> None:
    """The sender runs in a separate process, which is killed between two buckets."""
    context = clean_forks()
    ours, theirs = context.Pipe()
    process = context.Process(target=_send_two, args=(theirs,), daemon=True)
    process.start()
    engine = engines(ours.recv())
    ours.send("go")
    engine.tell(ours.recv())
    assert engine.answer()[0][0] == "0.a"
    ours.send("next")
    metadata = ours.recv()
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()
    engine.tell(replace(metadata, location={**metadata.location, "number": 2}))  # a bucket that was never broadcast
    first = engine.answer()
    if not isinstance(first, WeightSyncError):  # the second was complete before the sender died
        engine.tell(metadata)
        first = engine.answer()
    assert isinstance(first, WeightSyncError) and first.code == "sender-lost"
    engine.call("close")  # works without a sender


def test_closed_sender() -> None:
    gone = new_sender(timeout_s=1.0)
    rendezvous = gone.rendezvous()
    gone.close()
    with refused("sender-closed"):
        gone.send(bucket(0))
    with socket.socket() as held:  # so no other server gets the port
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((rendezvous["host"], rendezvous["port"]))
        with refused("no-sender"):
            open_receiver("gloo", rendezvous)


def test_bucket_of_another_sender() -> None:
    senders = [new_sender(), new_sender()]
    receiver = open_receiver("gloo", senders[0].rendezvous())
    other = open_receiver("gloo", senders[1].rendezvous())
    metadata = senders[1].send(bucket(0))
    with refused("foreign-bucket"):
        receiver.receive(metadata)
    assert len(list(other.receive(metadata))) == 3
    senders[1].release(metadata)
    for each in (receiver, other, receiver, *senders, *senders):
        each.close()


def test_stranger_cannot_join_by_guessing_names(engines: Start) -> None:
    """The store accepts any client, but its keys' names begin with the sender's random key."""
    sender = new_sender()
    rendezvous = sender.rendezvous()
    stranger = dist.TCPStore(rendezvous["host"], rendezvous["port"], is_master=False, wait_for_workers=False)
    stranger.add("joined", 1)
    for name in ("left/1", "broken/1"):
        stranger.set(name, "")
    stranger.set("generation/1", "[7]")
    guessed = set(stranger.list_keys())
    engine = engines(rendezvous)
    deliver(sender, [engine], bucket(0))
    others = set(stranger.list_keys()) - guessed
    assert others and all(name.startswith(f"{rendezvous['key']}/") for name in others)
    sender.close()


def _received(rendezvous: dict[str, Any], metadata: BucketMetadata) -> list[tuple[str, int]]:
    found = open_receiver("shared_memory", rendezvous).receive(metadata)
    return [(name, tensor_checksum(tensor)) for name, tensor in found]


def test_another_process_sees_the_same_bytes(session: str) -> None:
    sender = open_sender("shared_memory", session)
    metadata = sender.send(bucket(3))
    assert in_a_fork(_received, sender.rendezvous(), metadata) == checksums(bucket(3))
    assert len(left(session)) == 1  # the reader's exit removed nothing
    sender.close()
