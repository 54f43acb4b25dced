"""Receive, verify and copy into a model, in a process like an engine's."""

import multiprocessing
import resource
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from slime_like.errors import SlimeLikeError
from slime_like.interfaces import BucketMetadata
from slime_like.weights.checksums import timed_checksum
from slime_like.weights.received import Arrivals
from slime_like.weights.transports.registry import open_receiver

_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Received:
    """Seconds of one sync in the receiver by activity, and the peak memory of its process.

    ``cpu_s`` is processor time, which does not include other processes.
    """

    cpu_s: float
    hash_s: float
    load_s: float
    peak_bytes: int


class Receiving:
    """A receiver in a separate process, controlled through a pipe."""

    def __init__(self, transport: str, rendezvous: dict[str, Any]) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would have the sender's memory
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, transport, rendezvous), daemon=True)
        self._process.start()
        theirs.close()
        self._answer()

    def begin(self, verify: bool, load: bool) -> None:
        """Begin an update. Without ``load`` nothing is copied into the receiver's model."""
        self._connection.send((verify, load))

    def take(self, metadata: BucketMetadata) -> None:
        """Start taking a bucket; ``taken`` waits for it."""
        self._connection.send(metadata)

    def taken(self) -> None:
        self._answer()

    def finish(self) -> Received:
        self._connection.send(None)
        received: Received = self._answer()
        return received

    def close(self) -> None:
        self._process.kill()
        self._process.join()

    def _answer(self) -> Any:
        if not self._connection.poll(_TIMEOUT_S):
            raise SlimeLikeError(f"the receiver gave no answer within {_TIMEOUT_S:.0f} s", code="process-timed-out")
        answer = self._connection.recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer


def _serve(connection: Connection, transport: str, rendezvous: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    receiver = open_receiver(transport, rendezvous)
    model: dict[str, Tensor] = {}
    connection.send("ready")
    while True:
        verify, load = connection.recv()
        arrivals, load_s, cpu_started = Arrivals(), 0.0, time.process_time()
        while (metadata := connection.recv()) is not None:
            try:
                tensors = list(receiver.receive(metadata))
                for entry, (name, tensor) in zip(metadata.entries, tensors, strict=True) if verify else ():
                    found, hash_s = timed_checksum(tensor)
                    arrivals.hash_s += hash_s
                    arrivals.compare(entry, name, found)
            except SlimeLikeError as error:
                connection.send(error)
                continue
            started = time.perf_counter()
            for name, tensor in tensors if load else ():
                if name in model:
                    model[name].copy_(tensor)
                else:
                    model[name] = tensor.clone()
            load_s += time.perf_counter() - started
            connection.send("taken")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        connection.send(Received(time.process_time() - cpu_started, arrivals.hash_s, load_s, peak))
