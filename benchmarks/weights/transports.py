"""Send a whole model in buckets to a receiver in another process, and compare with a plain copy of the bytes.

Sending and receiving overlap as in a run: bucket k+1 is hashed and written while the receiver has bucket k. The
receiver hashes every tensor. Copying into its model, which is the engine's task, is measured separately.
"""

import resource
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.weights.model import buckets_of, half_billion
from benchmarks.weights.receiving import Received, Receiving
from slime_like.weights import transport as bucket_module
from slime_like.weights.checksums import copy_hashed
from slime_like.weights.transport import Sender, TransportSettings
from slime_like.weights.transports.registry import join_rendezvous, open_sender

BUCKET_BYTES = 256 << 20
_REPEATS = 5
_CHANGED_EVERY = 50
"""Distance of changed elements when only changes are sent: 2 % of them."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Wall and processor time of a plain copy."""

    seconds: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """One transport; medians over the repeats.

    Attributes:
        seconds: wall time with hashing on both sides, before the engine's copy.
        cpu_s: processor time of sender and receiver for it.
        unverified_s: wall time without any hashing.
        loaded_s: wall time with hashing and the copy into the engine's model.
        hash_s: seconds of hashing by sender and receiver.
        sender_peak, receiver_peak: peak memory of the process; the sender's includes the model.
    """

    name: str
    nbytes: int
    wire_nbytes: int
    seconds: float
    cpu_s: tuple[float, float]
    unverified_s: float
    unverified_cpu_s: tuple[float, float]
    loaded_s: float
    hash_s: tuple[float, float]
    sender_peak: int
    receiver_peak: int


def measure(scratch: Path) -> tuple[Copy, list[Row]]:
    """Measure a plain copy of the model's bytes on one thread, and each transport."""
    torch.set_num_threads(1)
    model = half_billion()
    rows: list[Row] = []
    copies: list[Copy] = []
    for name, delta in (
        ("shared_memory", False),
        ("gloo", False),
        ("directory", False),
        ("shared_memory", True),
        ("gloo", True),
    ):
        copies += plain_copies(model)
        rows.append(_measure_transport(name, delta, model, scratch))
    return Copy(median(copy.seconds for copy in copies), median(copy.cpu_s for copy in copies)), rows


def plain_copies(model: dict[str, Tensor]) -> list[Copy]:
    """Copy tensor by tensor into memory that is already allocated."""
    target = {name: tensor.clone() for name, tensor in model.items()}
    copies = []
    for _ in range(_REPEATS):
        started, cpu_started = time.perf_counter(), time.process_time()
        for name, tensor in model.items():
            target[name].copy_(tensor)
        copies.append(Copy(time.perf_counter() - started, time.process_time() - cpu_started))
    return copies


def _measure_transport(name: str, delta: bool, model: dict[str, Tensor], scratch: Path) -> Row:
    settings = TransportSettings(directory=scratch, timeout_s=120.0, delta=delta)
    sender = open_sender(name, "weights-benchmark", settings)
    receiving = Receiving(name, join_rendezvous([sender.rendezvous()]))
    try:
        _sync(sender, receiving, model, verify=True, load=True)  # makes buffers, connections and bases
        verified = [_sync(sender, receiving, _next(model, delta), verify=True, load=False) for _ in range(_REPEATS)]
        loaded = [_sync(sender, receiving, _next(model, delta), verify=True, load=True) for _ in range(_REPEATS)]
        with _without_hashing():  # last, because copies for deltas have wrong checksums afterwards
            bare = [_sync(sender, receiving, _next(model, delta), verify=False, load=False) for _ in range(_REPEATS)]
    finally:
        receiving.close()
        sender.close()
    return Row(
        name=name + (" + delta" if delta else ""),
        nbytes=sum(tensor.numel() * tensor.element_size() for tensor in model.values()),
        wire_nbytes=verified[-1].wire_nbytes,
        seconds=median(sync.seconds for sync in verified),
        cpu_s=_cpu(verified),
        unverified_s=median(sync.seconds for sync in bare),
        unverified_cpu_s=_cpu(bare),
        loaded_s=median(sync.seconds for sync in loaded),
        hash_s=(median(sync.hash_s for sync in verified), median(sync.received.hash_s for sync in verified)),
        sender_peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        receiver_peak=loaded[-1].received.peak_bytes,
    )


@dataclass(frozen=True, slots=True)
class _Sync:
    seconds: float
    cpu_s: float
    wire_nbytes: int
    hash_s: float
    received: Received


def _sync(sender: Sender, receiving: Receiving, model: dict[str, Tensor], verify: bool, load: bool) -> _Sync:
    receiving.begin(verify, load)
    wire, hash_s, previous = 0, 0.0, None
    started, cpu_started = time.perf_counter(), time.process_time()
    for bucket in buckets_of(model, BUCKET_BYTES):
        metadata = sender.send(bucket)
        wire, hash_s = wire + metadata.nbytes - metadata.saved_nbytes, hash_s + metadata.hash_s
        if previous is not None:
            receiving.taken()
            sender.release(previous)
        receiving.take(metadata)
        previous = metadata
    receiving.taken()
    if previous is not None:
        sender.release(previous)
    seconds = time.perf_counter() - started
    return _Sync(seconds, time.process_time() - cpu_started, wire, hash_s, receiving.finish())


def _next(model: dict[str, Tensor], delta: bool) -> dict[str, Tensor]:
    """Return the next step's model; with ``delta``, the lowest bit of every n-th element changes."""
    for tensor in model.values() if delta else ():
        tensor.view(torch.int16).view(-1)[::_CHANGED_EVERY] ^= 1
    return model


def _cpu(syncs: list[_Sync]) -> tuple[float, float]:
    return median(sync.cpu_s for sync in syncs), median(sync.received.cpu_s for sync in syncs)


@contextmanager
def _without_hashing() -> Iterator[None]:
    """Replace hashing copies by torch's plain copies."""

    def copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> tuple[list[int], float]:
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)
        return [0] * len(sources), 0.0

    assert bucket_module.copy_hashed is copy_hashed
    with patch.object(bucket_module, "copy_hashed", copy):
        yield
