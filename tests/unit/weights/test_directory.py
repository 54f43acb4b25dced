"""Buckets as files: never half of one, nothing left, and errors that say what to do."""

import errno
import os
import threading
import uuid
from pathlib import Path

import pytest

from slime_like.errors import WeightSyncError
from slime_like.weights.transport import Receiver, Sender, TransportSettings
from slime_like.weights.transports import directory
from slime_like.weights.transports.leftovers import cleanup
from slime_like.weights.transports.registry import open_receiver, open_sender
from tests.support.rejections import Rejects
from tests.support.weight_buckets import bucket, require_received

SESSION = "directory-test"


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Sender, Receiver]:
    sender = open_sender("directory", SESSION, TransportSettings(directory=tmp_path / "buckets"))
    return sender, open_receiver("directory", sender.rendezvous())


def test_a_receiver_cannot_change_what_others_read(pair: tuple[Sender, Receiver]) -> None:
    sender, receiver = pair
    metadata = sender.send(bucket(0))
    next(iter(receiver.receive(metadata)))[1].zero_()
    require_received(receiver.receive(metadata), bucket(0))


def test_a_late_file_is_waited_for(pair: tuple[Sender, Receiver], tmp_path: Path) -> None:
    """As on a network file system, where another host's rename is seen a little later."""
    sender, receiver = pair
    metadata = sender.send(bucket(0))
    path = tmp_path / "buckets" / metadata.location["file"]
    path.rename(path.with_name("elsewhere"))
    later = threading.Timer(0.2, lambda: path.with_name("elsewhere").rename(path))
    later.start()
    require_received(receiver.receive(metadata), bucket(0))
    later.join()


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
    assert list((tmp_path / "buckets").iterdir()) == []
    require_received(receiver.receive(sender.send(bucket(1))), bucket(1))


def test_directories_that_do_not_serve(tmp_path: Path, rejects: Rejects) -> None:
    (tmp_path / "file").write_text("")
    sender = open_sender("directory", SESSION, TransportSettings(directory=tmp_path / "file"))
    with rejects(WeightSyncError, "directory-refuses"):
        sender.send(bucket(0))
    with rejects(WeightSyncError, "no-directory"):
        open_sender("directory", SESSION)


def test_what_a_dead_sender_left_is_removed(tmp_path: Path) -> None:
    session, other = f"dead-{uuid.uuid4().hex}", f"living-{uuid.uuid4().hex}"
    for name in (session, other):
        open_sender("directory", name, TransportSettings(directory=tmp_path)).send(bucket(0))  # and never closed
    assert len(cleanup(session, [tmp_path, tmp_path / "not there"])) == 1
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(other)
