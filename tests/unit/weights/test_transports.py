"""Buckets in shared memory, in a directory, and in GPU memory without a GPU."""

import errno
import json
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from slime_like.errors import WeightSyncError
from slime_like.weights.transport import Receiver, Sender, TransportSettings
from slime_like.weights.transports import directory, shared_memory
from slime_like.weights.transports.colocated import DeviceMemory
from slime_like.weights.transports.names import cleanup
from slime_like.weights.transports.registry import open_receiver, open_sender
from tests.support.locked import Locked
from tests.support.rejections import Rejects
from tests.support.weight_buckets import bucket, left, refused, require_received


@pytest.fixture(params=["shared_memory", "colocated", "directory"])
def pair(request: pytest.FixtureRequest, session: str, tmp_path: Path) -> Iterator[tuple[Sender, Receiver]]:
    sender = open_sender(request.param, session, TransportSettings(directory=tmp_path))
    receiver = open_receiver(request.param, sender.rendezvous())
    yield sender, receiver
    receiver.close()
    sender.close()
    sender.close()
    assert left(session) == [] and list(tmp_path.iterdir()) == []


in_a_directory = pytest.mark.parametrize("pair", ["directory"], indirect=True)


def test_buckets_arrive_in_turn(pair: tuple[Sender, Receiver], session: str, tmp_path: Path) -> None:
    """Buckets of any size. The next one is written while the last one is read."""
    sender, receiver = pair
    sizes = (1000, 10, 10, 2_000_000, 3_000_000, 10, 4_000_000)
    ahead = sender.send(bucket(0, sizes[0]))
    for seed, elements in enumerate(sizes[1:], start=1):
        following = sender.send(bucket(seed, elements))
        require_received(receiver.receive(ahead), bucket(seed - 1, sizes[seed - 1]))
        sender.release(ahead)
        receiver.rest()
        assert len(left(session)) + len(list(tmp_path.iterdir())) <= 2
        ahead = following
    sender.release(ahead)


@pytest.mark.parametrize("transport", ["shared_memory", "colocated"])
def test_at_most_two_buckets_are_in_shared_memory(session: str, transport: str) -> None:
    sender = open_sender(transport, session)
    first, _ = sender.send(bucket(0)), sender.send(bucket(1))
    with refused("buckets-in-flight"):
        sender.send(bucket(2))
    sender.release(first)
    sender.release(sender.send(bucket(2)))
    sender.close()


def test_full_shared_memory(session: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shared_memory.os, "posix_fallocate", full)
    with pytest.raises(WeightSyncError, match=r"1048576 bytes needed.*bytes free; enlarge it") as caught:
        open_sender("shared_memory", session).send(bucket(0))
    assert caught.value.code == "shared-memory-full"
    assert left(session) == []


def test_missing_and_foreign_buckets(
    pair: tuple[Sender, Receiver], session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, _ = pair
    metadata, other = sender.send(bucket(0)), f"{session}x"
    stranger = open_receiver(metadata.transport, sender.rendezvous() | {"session": other, "sender": other})
    with refused("foreign-bucket"):
        stranger.receive(metadata)
    monkeypatch.setattr(directory, "_APPEARS_S", 0.1)
    sender, receiver = pair
    metadata = sender.send(bucket(0))
    sender.close()
    with pytest.raises(WeightSyncError, match="its sender closed or died, or ") as caught:
        receiver.receive(metadata)
    assert caught.value.code == "bucket-gone"


def test_shared_memory_is_locked_for_cuda_on_both_sides(session: str, monkeypatch: pytest.MonkeyPatch) -> None:
    locked = Locked()
    locked.use(monkeypatch)
    sender = open_sender("shared_memory", session)
    receiver = open_receiver("shared_memory", sender.rendezvous())
    small, large = 1 << 20, 4 << 20
    sizes = {10: [small] * 2, 20: [small] * 4, 1_000_000: [small] * 2 + [large] * 2, 30: [small] * 2 + [large] * 2}
    for elements, expected in sizes.items():  # the third replaces a segment
        metadata = sender.send(bucket(0, elements))
        require_received(receiver.receive(metadata), bucket(0, elements))
        sender.release(metadata)
        assert sorted(locked.ranges.values()) == expected
    receiver.close()
    assert len(locked.ranges) == 2
    dropped = open_receiver("shared_memory", sender.rendezvous())
    require_received(dropped.receive(metadata), bucket(0, 30))
    assert len(locked.ranges) == 3
    del dropped
    assert len(locked.ranges) == 2
    sender.close()
    assert locked.ranges == {} and locked.late == []


def test_memory_that_cuda_cannot_lock(session: str, monkeypatch: pytest.MonkeyPatch, rejects: Rejects) -> None:
    Locked(error=2).use(monkeypatch)
    with rejects(WeightSyncError, "not-pinned"):
        open_sender("shared_memory", session).send(bucket(0))
    assert left(session) == []


@pytest.mark.parametrize("name", ["", "short", "has/slash/in", "../../etc/passwd", "has spaces in it"])
def test_session_names(name: str, tmp_path: Path, rejects: Rejects) -> None:
    with rejects(WeightSyncError, "session-name"):
        open_sender("shared_memory", name)
    with rejects(WeightSyncError, "session-name"):
        cleanup(name, [tmp_path])


@in_a_directory
def test_receivers_have_private_mappings(pair: tuple[Sender, Receiver]) -> None:
    sender, receiver = pair
    metadata = sender.send(bucket(0))
    next(iter(receiver.receive(metadata)))[1].zero_()
    require_received(receiver.receive(metadata), bucket(0))


@in_a_directory
def test_late_file(pair: tuple[Sender, Receiver], tmp_path: Path) -> None:
    """On a network file system, another host's rename appears a little later."""
    sender, receiver = pair
    metadata = sender.send(bucket(0))
    path = tmp_path / metadata.location["file"]
    path.rename(path.with_name("elsewhere"))
    later = threading.Timer(0.2, lambda: path.with_name("elsewhere").rename(path))
    later.start()
    require_received(receiver.receive(metadata), bucket(0))
    later.join()


@in_a_directory
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk(
    pair: tuple[Sender, Receiver], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, rejects: Rejects
) -> None:
    sender, receiver = pair
    written = 0

    def full(descriptor: int, data: memoryview) -> int:
        nonlocal written
        written += 1
        if written > 1:
            raise OSError(number, os.strerror(number))
        return real(descriptor, data[:100])

    real = os.write
    with monkeypatch.context() as patch:
        patch.setattr(directory.os, "write", full)
        with rejects(WeightSyncError, "directory-refuses"):
            sender.send(bucket(0))
    assert list(tmp_path.iterdir()) == []
    require_received(receiver.receive(sender.send(bucket(1))), bucket(1))


def test_unusable_directories(session: str, tmp_path: Path, rejects: Rejects) -> None:
    (tmp_path / "file").write_text("")
    sender = open_sender("directory", session, TransportSettings(directory=tmp_path / "file"))
    with rejects(WeightSyncError, "directory-refuses"):
        sender.send(bucket(0))


def test_cleanup_after_a_dead_sender(session: str, tmp_path: Path) -> None:
    other = f"living-{session}"
    for name in (session, other):
        open_sender("directory", name, TransportSettings(directory=tmp_path)).send(bucket(0))  # and never closed
    assert len(cleanup(session, [tmp_path, tmp_path / "not there"])) == 1
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(other)


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
