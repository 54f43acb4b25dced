"""Buckets between two processes, and what is left of them afterwards: nothing."""

import errno
import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from slime_like.errors import WeightSyncError
from slime_like.interfaces import WeightBucket
from slime_like.weights.transports import shared_memory
from slime_like.weights.transports.leftovers import SHARED_MEMORY, cleanup
from slime_like.weights.transports.registry import open_receiver, open_sender


@pytest.fixture
def session() -> Iterator[str]:
    name = f"transport-test-{uuid.uuid4().hex}"
    yield name
    assert cleanup(name) == []


def left(session: str) -> list[str]:
    return [path.name for path in SHARED_MEMORY.iterdir() if path.name.startswith(session)]


def bucket(seed: int, elements: int = 1000) -> WeightBucket:
    generator = torch.Generator().manual_seed(seed)
    return WeightBucket([(f"{seed}.a", torch.randn(elements, generator=generator)), (f"{seed}.b", torch.ones(3, 5))])


def test_buckets_arrive_in_turn(session: str) -> None:
    sender = open_sender("shared_memory", session)
    receiver = open_receiver("shared_memory", sender.rendezvous())
    ahead = sender.send(bucket(0))
    for seed in range(1, 7):
        following = sender.send(bucket(seed, 1000 * seed))  # written while the other one is read
        for (name, tensor), (sent_name, sent) in zip(receiver.receive(ahead), bucket_of(ahead), strict=True):
            assert name == sent_name
            assert torch.equal(tensor, sent)
        sender.release(ahead)
        ahead = following
    assert len(left(session)) == 2
    receiver.close()
    sender.close()
    sender.close()
    assert left(session) == []


def bucket_of(metadata: object) -> list[tuple[str, torch.Tensor]]:
    entries = metadata.entries  # type: ignore[attr-defined]
    seed = int(entries[0].name.split(".")[0])
    return bucket(seed, entries[0].shape[0]).tensors


def test_a_larger_bucket_gets_a_larger_segment(session: str) -> None:
    sender = open_sender("shared_memory", session)
    receiver = open_receiver("shared_memory", sender.rendezvous())
    for elements in (10, 10, 2_000_000, 3_000_000, 10, 4_000_000):
        metadata = sender.send(bucket(1, elements))
        assert torch.equal(next(iter(receiver.receive(metadata)))[1], bucket(1, elements).tensors[0][1])
        sender.release(metadata)
        assert len(left(session)) <= 2
    sender.close()


def test_at_most_two_buckets_are_in_flight(session: str) -> None:
    sender = open_sender("shared_memory", session)
    first, _ = sender.send(bucket(0)), sender.send(bucket(1))
    with pytest.raises(WeightSyncError, match="both shared-memory segments are in flight"):
        sender.send(bucket(2))
    sender.release(first)
    with pytest.raises(WeightSyncError, match="is not in flight"):
        sender.release(first)
    sender.release(sender.send(bucket(2)))
    sender.close()


def test_a_sender_that_is_gone_is_named(session: str) -> None:
    sender = open_sender("shared_memory", session)
    receiver = open_receiver("shared_memory", sender.rendezvous())
    metadata = sender.send(bucket(0))
    sender.close()
    with pytest.raises(WeightSyncError, match="its sender closed or died, or runs on another host"):
        receiver.receive(metadata)


def test_a_full_device_says_how_much_is_needed(session: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shared_memory.os, "posix_fallocate", full)
    with pytest.raises(WeightSyncError, match=r"too small.*1048576 bytes needed.*bytes free; enlarge it"):
        open_sender("shared_memory", session).send(bucket(0))
    assert left(session) == []


def test_a_receiver_stays_in_its_session(session: str) -> None:
    sender = open_sender("shared_memory", session)
    stranger = open_receiver("shared_memory", {**sender.rendezvous(), "session": f"{session}x"})
    with pytest.raises(WeightSyncError, match="does not belong"):
        stranger.receive(sender.send(bucket(0)))
    sender.close()


@pytest.mark.parametrize("name", ["", "short", "has/slash/in", "../../etc/passwd", "has spaces in it"])
def test_sessions_that_could_remove_too_much_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(WeightSyncError, match="session"):
        open_sender("shared_memory", name)
    with pytest.raises(WeightSyncError, match="session"):
        cleanup(name, [tmp_path])


def test_unknown_transports_list_the_known() -> None:
    with pytest.raises(WeightSyncError, match=r"sync.transport=pigeon is unknown; use auto or one of .*shared_memory"):
        open_sender("pigeon", "some-session")
