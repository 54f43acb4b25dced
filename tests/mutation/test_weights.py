"""Put bugs into weight syncs, one at a time: the verification of the sync must catch each.

The run's own ``WeightSync`` sends weights to a real engine. Without the bug the sync must succeed: a crash is no proof.
"""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rollout.transformers import weights as model_weights
from rollout.transformers.engine import TransformersEngine
from slime_like.errors import WeightSyncError
from slime_like.examples.tiny_model import make_tiny_model
from slime_like.interfaces import BucketMetadata, Manifest, TensorEntry
from slime_like.interfaces.conversion import TensorInfo
from slime_like.weights.received import Arrivals
from slime_like.weights.transports import shared_memory
from tests.engines.harness import run_config
from tests.engines.local_sync import LocalEngines, LocalTrainers, new_sync

QUERY = "model.layers.1.self_attn.q_proj.weight"


def swapped(weight: Tensor) -> Tensor:
    """Swap the first row of the first head with that of the second head."""
    rows = torch.arange(len(weight))
    rows[[0, 32]] = rows[[32, 0]]
    return weight[rows]


# ------------------------------------------------------------------------------------------------------------ the bugs
Patch = pytest.MonkeyPatch


def the_export_swaps_two_rows(patch: Patch, trainers: LocalTrainers, engines: LocalEngines) -> None:
    """Like a wrong QKV order: the hashed tensors are already wrong."""
    weights = {name: swapped(weight) if name == QUERY else weight for name, weight in trainers.weights.items()}
    patch.setattr(trainers, "exported", lambda: weights)


def the_transport_swaps_two_rows(patch: Patch, trainers: LocalTrainers, engines: LocalEngines) -> None:
    receive = shared_memory.SharedMemoryReceiver.receive

    def wrong(self: Any, metadata: BucketMetadata) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in receive(self, metadata):
            yield name, swapped(tensor) if name == QUERY else tensor

    patch.setattr(shared_memory.SharedMemoryReceiver, "receive", wrong)


def a_tensor_keeps_two_elements_of_another_order(patch: Patch, trainers: LocalTrainers, engines: LocalEngines) -> None:
    """The sum of the bytes stays the same."""
    receive = shared_memory.SharedMemoryReceiver.receive

    def wrong(self: Any, metadata: BucketMetadata) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in receive(self, metadata):
            if name == QUERY:
                tensor[0, 0], tensor[5, 7] = tensor[5, 7].clone(), tensor[0, 0].clone()
            yield name, tensor

    patch.setattr(shared_memory.SharedMemoryReceiver, "receive", wrong)


def the_export_forgets_a_tensor(patch: Patch, trainers: LocalTrainers, engines: LocalEngines) -> None:
    """Its manifest, buckets and hashes agree. The engine would keep the old tensor."""
    weights = {name: weight for name, weight in trainers.weights.items() if name != QUERY}
    patch.setattr(trainers, "exported", lambda: weights)


def the_export_has_a_tensor_too_many(patch: Patch, trainers: LocalTrainers, engines: LocalEngines) -> None:
    weights = {**trainers.weights, "model.layers.1.self_attn.q_proj.bias": torch.zeros(4)}
    patch.setattr(trainers, "exported", lambda: weights)


def the_export_passes_for_an_adapter(patch: Patch, trainers: LocalTrainers, engines: LocalEngines) -> None:
    """A partial manifest is not compared with the model."""
    the_export_forgets_a_tensor(patch, trainers, engines)
    begin = trainers.begin_export
    patch.setattr(trainers, "begin_export", lambda: [replace(part, updates="adapter") for part in begin()])


def the_manifest_has_another_type(patch: Patch, trainers: LocalTrainers, engines: LocalEngines) -> None:
    begin = trainers.begin_export
    wrong = TensorInfo("bfloat16", tuple(trainers.weights[QUERY].shape))
    patch.setattr(trainers, "begin_export", lambda: [Manifest({**part.tensors, QUERY: wrong}) for part in begin()])


def the_sender_drops_a_bucket(patch: Patch, trainers: LocalTrainers, engines: LocalEngines) -> None:
    buckets = trainers._buckets
    patch.setattr(trainers, "_buckets", lambda tensors: iter(list(buckets(tensors))[1:]))


def the_engine_drops_a_bucket(patch: Patch, trainers: LocalTrainers, engines: LocalEngines) -> None:
    update = engines.update
    patch.setattr(engines, "update", lambda buckets, before: update(buckets[1:], before))


def the_engine_hashes_a_bucket_and_does_not_load_it(
    patch: Patch, trainers: LocalTrainers, engines: LocalEngines
) -> None:
    """Old tensors stay among the new ones."""
    destination = model_weights.destination

    def nowhere(name: str, tensors: dict[str, Tensor]) -> Tensor:
        place = destination(name, tensors)
        return place.clone() if ".layers.1." in name else place

    patch.setattr(model_weights, "destination", nowhere)


def the_engine_serves_the_old_version(patch: Patch, trainers: LocalTrainers, engines: LocalEngines) -> None:
    """It acknowledges every bucket and claims to serve the new version."""
    destination = model_weights.destination
    patch.setattr(model_weights, "destination", lambda name, tensors: destination(name, tensors).clone())


def the_engine_echoes_the_checksums_it_got(patch: Patch, trainers: LocalTrainers, engines: LocalEngines) -> None:
    """It drops a tensor's bytes and answers with the sender's checksums."""

    def believe(self: Arrivals, entry: TensorEntry, name: str, found: int) -> None:
        self.checksums[entry.name] = entry.checksum

    patch.setattr(Arrivals, "compare", believe)
    the_transport_swaps_two_rows(patch, trainers, engines)


HASH, PROBE, WHOLE = "arrived damaged", "logprobs differ from the trainer's", "is incomplete"


@pytest.mark.parametrize(
    ("bug", "caught_by"),
    [
        (the_export_swaps_two_rows, PROBE),
        (the_transport_swaps_two_rows, HASH),
        (a_tensor_keeps_two_elements_of_another_order, HASH),
        (the_export_forgets_a_tensor, WHOLE),
        (the_export_has_a_tensor_too_many, WHOLE),
        (the_export_passes_for_an_adapter, "cannot update adapter"),
        (the_manifest_has_another_type, "but the manifest has bfloat16"),
        (the_sender_drops_a_bucket, WHOLE),
        (the_engine_drops_a_bucket, WHOLE),
        (the_engine_hashes_a_bucket_and_does_not_load_it, PROBE),
        (the_engine_serves_the_old_version, PROBE),
        (the_engine_echoes_the_checksums_it_got, PROBE),
    ],
)
def test_the_verification_catches(
    synced: tuple[LocalTrainers, LocalEngines, Any],
    monkeypatch: pytest.MonkeyPatch,
    bug: Callable[[Patch, LocalTrainers, LocalEngines], None],
    caught_by: str,
) -> None:
    trainers, engines, sync = synced
    with monkeypatch.context() as patch:
        train(trainers)
        bug(patch, trainers, engines)
        with pytest.raises(WeightSyncError, match=caught_by):
            sync.run(101)
    sync.run(102)  # succeeds without the bug


def train(trainers: LocalTrainers) -> None:
    generator = torch.Generator().manual_seed(7)
    for weight in trainers.weights.values():
        weight += 0.05 * torch.randn(weight.shape, generator=generator)


@pytest.fixture(scope="module")
def synced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalTrainers, LocalEngines, Any]]:
    root = tmp_path_factory.mktemp("weights")
    make_tiny_model(root / "model", family="qwen3", seed=0)
    config = run_config(root / "model", root / "run")
    loop = asyncio.new_event_loop()
    trainers = LocalTrainers(root / "model", root, num_senders=1)
    engines = LocalEngines(TransformersEngine(config, 0), loop)
    engines.run(engines.engine.start())
    sync = new_sync(config, trainers, engines)
    sync.run(100)
    yield trainers, engines, sync
    trainers.close()
    engines.run(engines.engine.stop())
    loop.close()
