"""Buckets as files: never half of one, nothing left, and errors that say what to do."""

import errno
import os
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from slime_like.errors import WeightSyncError
from slime_like.interfaces import WeightBucket
from slime_like.weights.transport import Receiver, Sender, TransportSettings
from slime_like.weights.transports import directory
from slime_like.weights.transports.leftovers import cleanup
from slime_like.weights.transports.registry import open_receiver, open_sender

SESSION = "directory-test"


def bucket(seed: int, elements: int = 1000) -> WeightBucket:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(elements, generator=generator)
    return WeightBucket([(f"{seed}.a", values), (f"{seed}.b", torch.empty(0)), (f"{seed}.c", values[:7].half())])


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Sender, Receiver]]:
    sender = open_sender("directory", SESSION, TransportSettings(directory=tmp_path / "buckets"))
    receiver = open_receiver("directory", sender.rendezvous())
    yield sender, receiver
    receiver.close()
    sender.close()
    sender.close()
    assert not (tmp_path / "buckets").exists() or list((tmp_path / "buckets").iterdir()) == []


def test_buckets_arrive_and_go(pair: tuple[Sender, Receiver], tmp_path: Path) -> None:
    sender, receiver = pair
    ahead = sender.send(bucket(0))
    for seed in range(1, 5):
        following = sender.send(bucket(seed, 1000 * seed))
        received = list(receiver.receive(ahead))
        for (name, tensor), (sent_name, sent) in zip(
            received, bucket(seed - 1, len(received[0][1])).tensors, strict=True
        ):
            assert name == sent_name
            assert torch.equal(tensor, sent)
        sender.release(ahead)
        assert len(list((tmp_path / "buckets").iterdir())) == 1
        ahead = following
    sender.release(ahead)


def test_a_receiver_cannot_change_what_others_read(pair: tuple[Sender, Receiver]) -> None:
    sender, receiver = pair
    metadata = sender.send(bucket(0))
    next(iter(receiver.receive(metadata)))[1].zero_()
    assert torch.equal(next(iter(receiver.receive(metadata)))[1], bucket(0).tensors[0][1])
    sender.release(metadata)


def test_a_bucket_that_is_gone_is_named(pair: tuple[Sender, Receiver], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(directory, "_APPEARS_S", 0.1)
    sender, receiver = pair
    metadata = sender.send(bucket(0))
    sender.close()
    with pytest.raises(WeightSyncError, match=r"its sender closed or died, or sync.directory is not the same"):
        receiver.receive(metadata)


def test_a_late_file_is_waited_for(pair: tuple[Sender, Receiver], tmp_path: Path) -> None:
    """As on a network file system, where another host's rename is seen a little later."""
    sender, receiver = pair
    metadata = sender.send(bucket(0))
    path = tmp_path / "buckets" / metadata.location["file"]
    path.rename(path.with_name("elsewhere"))
    later = threading.Timer(0.2, lambda: path.with_name("elsewhere").rename(path))
    later.start()
    assert len(list(receiver.receive(metadata))) == 3
    later.join()
    sender.release(metadata)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk(
    pair: tuple[Sender, Receiver], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
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
        with pytest.raises(WeightSyncError, match=r"sync.directory=.* cannot take .* 4096 bytes: .*; free some space"):
            sender.send(bucket(0))
    assert list((tmp_path / "buckets").iterdir()) == []
    metadata = sender.send(bucket(1))
    assert torch.equal(next(iter(receiver.receive(metadata)))[1], bucket(1).tensors[0][1])
    sender.release(metadata)


def test_a_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    sender = open_sender("directory", SESSION, TransportSettings(directory=tmp_path / "file"))
    with pytest.raises(WeightSyncError, match=r"choose one that can be written to"):
        sender.send(bucket(0))


def test_it_requires_a_directory() -> None:
    with pytest.raises(WeightSyncError, match=r"needs sync.directory"):
        open_sender("directory", SESSION)


def test_what_a_dead_sender_left_is_removed(tmp_path: Path) -> None:
    session, other = f"dead-{uuid.uuid4().hex}", f"living-{uuid.uuid4().hex}"
    for name in (session, other):
        open_sender("directory", name, TransportSettings(directory=tmp_path)).send(bucket(0))  # and never closed
    assert len(cleanup(session, [tmp_path, tmp_path / "not there"])) == 1
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(other)


def test_a_receiver_stays_in_its_session(pair: tuple[Sender, Receiver]) -> None:
    sender, _ = pair
    stranger = open_receiver("directory", {**sender.rendezvous(), "session": f"{SESSION}x"})
    with pytest.raises(WeightSyncError, match=r"does not belong"):
        stranger.receive(sender.send(bucket(0)))
