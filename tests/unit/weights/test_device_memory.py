"""GPU memory shared between two processes, without a GPU: handles, mapping, freeing.

A stand-in replaces torch's sharing of storages. ``tests/process`` tests CUDA itself.
"""

import json
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from slime_like.errors import WeightSyncError
from slime_like.weights.transport import Sender, TransportSettings
from slime_like.weights.transports.colocated import DeviceMemory
from slime_like.weights.transports.registry import open_receiver, open_sender
from tests.support.rejections import Rejects
from tests.support.weight_buckets import bucket, refused, require_received

EMPTY = torch.empty


class Gpu:
    """One device, with host memory. ``mapped`` has the arguments of every mapping."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.uuid = "GPU-0"
        self.shared: list[torch.UntypedStorage] = []
        self.mapped: list[Sequence[Any]] = []
        self.collect = mock.Mock()
        cuda = torch.cuda
        patch.setattr(cuda, "is_available", lambda: True)
        patch.setattr(cuda, "current_device", lambda: 0)
        patch.setattr(cuda, "get_device_properties", lambda index: mock.Mock(uuid=self.uuid))
        patch.setattr(cuda, "ipc_collect", self.collect)
        patch.setattr(torch, "empty", lambda *sizes, device=None, **options: EMPTY(*sizes, **options))
        patch.setattr(torch.UntypedStorage, "_share_cuda_", lambda storage: self._share(storage), raising=False)
        patch.setattr(torch.UntypedStorage, "_new_shared_cuda", self._map, raising=False)

    def _share(self, storage: torch.UntypedStorage) -> tuple[Any, ...]:
        """Return device, memory handle, bytes, offset, counter's handle and offset, event's handle, and a flag."""
        self.shared.append(storage)
        number = len(self.shared) - 1
        return (0, bytes([number, 255]), storage.nbytes(), 0, b"\x00count", 7, b"event\xfe", True)

    def _map(self, index: int, *values: Any) -> torch.UntypedStorage:
        self.mapped.append((index, *values))
        return self.shared[values[0][0]]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def test_handle(gpu: Gpu, rejects: Rejects) -> None:
    memory = DeviceMemory(5)
    handle = json.loads(json.dumps(memory.handle))
    mapped = DeviceMemory.map(handle)
    granule = 1 << 21
    assert gpu.mapped == [(0, b"\x00\xff", granule, 0, b"\x00count", 7, b"event\xfe", True)]
    assert mapped.shape == (granule,) and mapped.data_ptr() == memory.buffer.data_ptr()
    gpu.uuid = "GPU-1"
    with rejects(WeightSyncError, "gpu-unseen"):
        DeviceMemory.map(handle)


def test_buffers_are_reused_grow_and_are_freed(gpu: Gpu, session: str) -> None:
    sender = open_sender("colocated", session, TransportSettings(keep_nbytes=16 << 20))
    receiver = open_receiver("colocated", sender.rendezvous())

    def deliver(sender: Sender, elements: Sequence[int]) -> None:
        for elements_of_one in elements:
            metadata = sender.send(bucket(0, elements_of_one))
            require_received(receiver.receive(metadata), bucket(0, elements_of_one))
            sender.release(metadata)

    deliver(sender, [10, 20, 30, 40])
    assert (len(gpu.shared), len(gpu.mapped), gpu.collect.call_count) == (2, 2, 2)
    deliver(sender, [1_000_000, 50, 60, 2_000_000, 70, 80])  # replaces one, and then the other
    assert (len(gpu.shared), len(gpu.mapped), gpu.collect.call_count) == (4, 4, 4)
    receiver.rest()
    sender.rest()
    assert gpu.collect.call_count == 5
    deliver(sender, [10, 5_000_000, 20, 30])  # the second is too large to be kept
    assert (len(gpu.shared), len(gpu.mapped)) == (7, 7)
    assert [storage.nbytes() >> 21 for storage in gpu.shared[-3:]] == [1, 10, 1]
    receiver.close()
    sender.close()


def test_worker_on_another_gpu(gpu: Gpu, session: str) -> None:
    rendezvous = open_sender("colocated", session).rendezvous()
    gpu.uuid = "GPU-1"
    with refused("unpaired"):
        open_receiver("colocated", rendezvous)
