"""Weights reach the engine workers on the trainers' devices completely, from the rank on the same device, once."""

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from slime_like.config import RunConfig
from slime_like.interfaces import BucketMetadata, RankCoordinates, RankPlacement, WeightBucket, WeightExport
from slime_like.orchestration.trainer import rank_export
from slime_like.orchestration.trainer.rank_export import RankExport
from slime_like.weights.checksums import tensor_checksum
from slime_like.weights.received import Arrivals
from slime_like.weights.transport import bucket_nbytes
from slime_like.weights.transports.registry import for_engine, join_buckets, join_rendezvous, open_receiver
from tests.parallel.ranks import run_ranks
from tests.support.weight_buckets import bucket, left

TENSOR, PIPELINE, ENGINE = 2, 2, 2
SIZES = ((50, 3000, 10), (700, 20_000))
"""Number of elements of each stage's buckets; they grow, so that buffers are replaced."""


def sent(sync: int) -> list[WeightBucket]:
    return [bucket(100 * sync + 10 * stage + turn, size) for stage in (0, 1) for turn, size in enumerate(SIZES[stage])]


class Backend:
    """One rank's part of an export: a stage's first rank has the tensors, the other takes part, replicas have none."""

    def __init__(self, place: RankCoordinates) -> None:
        self._place = place
        self.sync = 0

    def export_weights(self) -> WeightExport:
        return WeightExport(None, self._buckets())

    def _buckets(self) -> Iterator[WeightBucket]:
        if self._place.context:
            return
        first = len(SIZES[0]) * self._place.pipeline
        for each in sent(self.sync)[first : first + len(SIZES[self._place.pipeline])]:
            yield each if self._place.tensor == 0 else WeightBucket([])


@contextlib.contextmanager
def counted_messages() -> Iterator[list[int]]:
    """Record the bytes of every broadcast of weights."""
    counted: list[int] = []
    broadcast = dist.broadcast

    def count(tensor: torch.Tensor, src: int) -> None:
        if tensor.dtype == torch.uint8:
            counted.append(tensor.nbytes)
        broadcast(tensor, src)

    with mock.patch.object(dist, "broadcast", count):
        yield counted


def everyone(value: Any) -> list[Any]:
    """Gather values from all ranks, as the driver gathers answers."""
    answers = [None] * dist.get_world_size()
    dist.all_gather_object(answers, value)
    return answers


def _export(placement: RankPlacement, session: str, config: RunConfig) -> list[dict[str, int]]:
    """Do two syncs and return what this rank's worker received in each."""
    address = f"tcp://{placement.master_address}:{placement.master_port}"
    dist.init_process_group("gloo", init_method=address, rank=placement.rank, world_size=placement.world_size)
    tensor, rest = placement.rank % TENSOR, placement.rank // TENSOR
    place = RankCoordinates(tensor, rest // 2, rest % 2, 0, 0, 1)
    backend: Any = Backend(place)
    export = RankExport(config)
    export.backend, export.place = backend, place
    first_rank, worker = placement.rank // ENGINE * ENGINE, placement.rank % ENGINE
    received = []
    with mock.patch.object(rank_export, "node_address", lambda: "127.0.0.1"), counted_messages() as messages:
        rendezvous = join_rendezvous(everyone(export.open_transport("colocated", session, False)))
        receiver = open_receiver("colocated", json.loads(json.dumps(for_engine(rendezvous, first_rank))), worker)
        for backend.sync in range(2):
            messages.clear()
            export.begin_export()
            arrivals, sizes = Arrivals(), []
            while buckets := join_buckets(everyone(export.next_bucket())):
                (metadata,) = buckets
                wired = BucketMetadata.from_wire(json.loads(json.dumps(metadata.to_wire())))
                sizes += arrived(arrivals, receiver, wired)
            receiver.rest()
            export.end_export()
            assert messages == sizes == [bucket_nbytes(each) for each in sent(backend.sync)]
            received.append(arrivals.checksums)
    receiver.close()
    export.close_transport()
    dist.destroy_process_group()
    return received


def arrived(arrivals: Arrivals, receiver: Any, metadata: BucketMetadata) -> list[int]:
    """Verify what a worker receives and that it maps only its own rank's memory; return the bytes that it read."""
    arrivals.copies(metadata.entries, receiver.receive(metadata), "cpu")
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/" in line}
    ours = {name for name in mapped if metadata.location["sender"] in name}
    assert ours and all(f".{os.getpid()}." in name for name in ours)
    return [sum(-(-entry.nbytes // 64) * 64 for entry in metadata.entries)]


@pytest.mark.timeout(180)
def test_every_byte_reaches_every_rank_once(session: str, tmp_path: Path) -> None:
    """Trainers with tensor=2, pipeline=2, context=2 send to four engines with tensor=2."""
    config = RunConfig.model_validate({"run_dir": "unused", "model": {"path": "unused"}})
    results = run_ranks(_export, TENSOR * PIPELINE * 2, tmp_path, session, config)
    for sync in range(2):
        expected = {name: tensor_checksum(tensor) for each in sent(sync) for name, tensor in each.tensors}
        assert [found[sync] for found in results] == [expected] * 8
    assert left(session) == []
