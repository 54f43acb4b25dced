"""Buckets mapped from another process on the same GPU. Written and never run: no GPU was at hand."""

import multiprocessing
from multiprocessing.connection import Connection
from typing import Any

import pytest

from slime_like.errors import WeightSyncError
from slime_like.interfaces import WeightBucket
from slime_like.weights.checksums import tensor_checksum
from slime_like.weights.transports.registry import open_receiver, open_sender
from tests.support.rejections import Rejects
from tests.support.weight_buckets import bucket

pytestmark = pytest.mark.gpu

SESSION = "cuda-ipc-test"


def on_cuda(seed: int, elements: int) -> WeightBucket:
    return WeightBucket([(name, tensor.cuda()) for name, tensor in bucket(seed, elements).tensors])


def test_buckets_arrive_in_turn_in_another_process() -> None:
    context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    ours, theirs = context.Pipe()
    sender = open_sender("cuda_ipc", SESSION)
    process = context.Process(target=_engine, args=(theirs, sender.rendezvous()), daemon=True)
    process.start()
    try:
        for seed, elements in enumerate((10, 1000, 5_000_000, 10, 9_000_000, 10)):  # buffers grow on the way
            sent = on_cuda(seed, elements)
            metadata = sender.send(sent)
            ours.send(metadata)
            assert ours.poll(60)
            assert ours.recv() == [(name, tensor_checksum(tensor)) for name, tensor in sent.tensors]
            sender.release(metadata)
    finally:
        process.kill()
        process.join()
        sender.close()
        sender.close()


def test_at_most_two_buckets_are_in_flight(rejects: Rejects) -> None:
    sender = open_sender("cuda_ipc", SESSION)
    first, _ = sender.send(on_cuda(0, 10)), sender.send(on_cuda(1, 10))
    with rejects(WeightSyncError, "buckets-in-flight"):
        sender.send(on_cuda(2, 10))
    sender.release(first)
    with rejects(WeightSyncError, "not-in-flight"):
        sender.release(first)
    sender.close()


def _engine(connection: Connection, rendezvous: dict[str, Any]) -> None:
    receiver = open_receiver("cuda_ipc", rendezvous)
    while True:
        received = receiver.receive(connection.recv())
        connection.send([(name, tensor_checksum(tensor)) for name, tensor in received])
