"""Changes instead of tensors: the receiver ends with the sender's bits, or with an error.

Tests compare integers, because as floats NaN differs from itself and -0.0 equals 0.0.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from slime_like.errors import WeightSyncError
from slime_like.interfaces import BucketMetadata, WeightBucket
from slime_like.weights.checksums import tensor_checksum
from slime_like.weights.delta import BLOCK, apply_changes, as_integers, encode_changes, find_changes
from slime_like.weights.received import Arrivals
from slime_like.weights.transport import Receiver, Sender, TransportSettings, is_base_lost
from slime_like.weights.transports.registry import join_rendezvous, open_receiver, open_sender
from tests.support.properties import examples
from tests.support.rejections import Rejects
from tests.support.weight_buckets import refused

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn)


def bits(tensor: Tensor) -> np.ndarray:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def new_pair(session: str) -> tuple[Sender, Receiver]:
    sender = open_sender("shared_memory", session, TransportSettings(delta=True))
    return sender, open_receiver("shared_memory", join_rendezvous([sender.rendezvous()]))


def deliver(sender: Sender, receiver: Receiver, tensors: dict[str, Tensor]) -> BucketMetadata:
    """Send one bucket as to an engine's worker, with metadata as plain values."""
    metadata = sender.send(WeightBucket(list(tensors.items())))
    seen = BucketMetadata.from_wire(metadata.to_wire())
    received = list(receiver.receive(seen))
    Arrivals().copies(seen.entries, received, "cpu")
    for (name, tensor), (sent_name, sent), entry in zip(received, tensors.items(), metadata.entries, strict=True):
        assert name == sent_name == entry.name
        assert tensor.dtype == sent.dtype and tensor.shape == sent.shape
        assert np.array_equal(bits(tensor), bits(sent))
        assert entry.checksum == tensor_checksum(sent)
    sender.release(metadata)
    return metadata


# ------------------------------------------------------------------------------------------------------------ encoding
@examples(60)
@given(data=st.data())
def test_changes_are_found_and_applied(data: st.DataObject) -> None:
    """Random bit patterns (including NaNs), lengths around words and blocks, any alignment."""
    dtype = data.draw(st.sampled_from(DTYPES))
    size = data.draw(st.sampled_from((0, 1, 3, 4, 7, 8, 1000, BLOCK - 1, BLOCK, BLOCK + 1, 17 * BLOCK + 5)))
    generator = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    offset = data.draw(st.integers(0, 3))
    raw = torch.from_numpy(generator.integers(0, 256, (size + offset + 1) * dtype.itemsize, dtype=np.uint8))
    base = as_integers(raw.view(dtype)[offset:-1])
    new = base.clone()
    count = min(size, data.draw(st.sampled_from((0, 1, 2, 50, 10**6))))
    places = torch.from_numpy(generator.choice(size, count, replace=False)) if count else torch.empty(0).long()
    new[places] = new[places] ^ data.draw(st.sampled_from((1, 3, -(2 ** (8 * dtype.itemsize - 1)))))

    found = find_changes(new, base)
    assert torch.equal(found, places.sort().values)
    encoded = encode_changes(new, found)
    copy = base.clone()
    apply_changes(copy, encoded, len(found))
    assert torch.equal(copy, new)


# ---------------------------------------------------------------------------------------------------- sender, receiver
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_syncs_bit_for_bit(session: str, dtype: torch.dtype) -> None:
    """Few changes, none, all, signs of zero, NaNs with payloads, and empty and odd tensors.

    The sender receives the model's own memory, which is overwritten between syncs.
    """
    generator = torch.Generator().manual_seed(0)
    sender, receiver = new_pair(session)
    tensors = {
        "large": torch.randn(300, 301, generator=generator).to(dtype),
        "odd": torch.randn(7, generator=generator).to(dtype),
        "empty": torch.empty(0, 5, dtype=dtype),
        "still": torch.ones(64, 64, dtype=dtype),
    }
    whole = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    first = deliver(sender, receiver, tensors)
    assert (first.nbytes, first.saved_nbytes, first.compared) == (whole, 0, 0)

    large = as_integers(tensors["large"])
    large[::1000] ^= 1
    few = deliver(sender, receiver, tensors)
    assert few.changed == len(large[::1000])
    assert few.compared == sum(tensor.numel() for tensor in tensors.values())
    assert few.nbytes - few.saved_nbytes < whole / 10

    none = deliver(sender, receiver, tensors)
    assert none.changed == 0

    large[5:40] = int(torch.iinfo(large.dtype).max)  # a NaN whose payload is all ones
    large[40] = 0
    deliver(sender, receiver, tensors)
    large[6] -= 1  # another payload
    large[40] = int(torch.iinfo(large.dtype).min)  # -0.0 where 0.0 was
    assert deliver(sender, receiver, tensors).changed == 2

    large ^= 1
    every = deliver(sender, receiver, tensors)
    assert every.changed == large.numel()
    assert every.location["changes"][0] is None  # the whole tensor is smaller
    large[3] ^= 1
    assert deliver(sender, receiver, tensors).changed == 1  # the whole tensor is the new base
    receiver.close()
    sender.close()


def test_tensor_of_another_shape_or_type_is_sent_whole(session: str) -> None:
    sender, receiver = new_pair(session)
    for tensor in (torch.ones(4, 6), torch.ones(6, 4), torch.ones(6, 4).half(), torch.ones(6, 4, 2).half()):
        metadata = deliver(sender, receiver, {"t": tensor})
        assert metadata.location["changes"] == [None]
    sender.close()


def test_two_receivers_of_one_sender(session: str) -> None:
    sender, receiver = new_pair(session)
    other = open_receiver("shared_memory", sender.rendezvous())
    weight = torch.zeros(5000)
    for step in range(4):
        weight[step * 100] = step
        metadata = sender.send(WeightBucket([("t", weight)]))
        for each in (receiver, other):
            ((_, tensor),) = each.receive(metadata)
            assert torch.equal(tensor, weight)
        sender.release(metadata)
    sender.close()


# ---------------------------------------------------------------------------------------------------------- lost bases
def lose_by_restart(session: str, sender: Sender, receiver: Receiver, weight: Tensor) -> Receiver:
    receiver.close()
    return open_receiver("shared_memory", sender.rendezvous())


def lose_by_a_missed_bucket(session: str, sender: Sender, receiver: Receiver, weight: Tensor) -> Receiver:
    weight[17] += 1
    sender.release(sender.send(WeightBucket([("t", weight)])))  # the receiver failed before this one
    return receiver


def lose_by_damage(session: str, sender: Sender, receiver: Receiver, weight: Tensor) -> Receiver:
    """A damaged bucket is rejected, and its copy is not a base."""
    weight[18] += 1
    metadata = sender.send(WeightBucket([("t", weight)]))
    entry = replace(metadata.entries[0], checksum=metadata.entries[0].checksum ^ 1)
    received = list(receiver.receive(replace(metadata, entries=(entry,))))
    with refused("damaged-tensor"):
        Arrivals().copies((entry,), received, "cpu")
    sender.release(metadata)
    return receiver


@pytest.mark.parametrize("lose", [lose_by_restart, lose_by_a_missed_bucket, lose_by_damage])
def test_lost_base(rejects: Rejects, session: str, lose: Any) -> None:
    sender, receiver = new_pair(session)
    weight = torch.zeros(5000)
    deliver(sender, receiver, {"t": weight})
    receiver = lose(session, sender, receiver, weight)
    weight[3] = 1
    metadata = sender.send(WeightBucket([("t", weight)]))
    with rejects(WeightSyncError, "delta-base-lost") as refusal:
        list(receiver.receive(metadata))
    assert is_base_lost(refusal.value)
    assert is_base_lost(WeightSyncError(f"engine 0: update failed: WeightSyncError: {refusal.value}"))
    sender.release(metadata)
    sender.close()
    sender = open_sender("shared_memory", session, TransportSettings(delta=True))  # a new sender has no bases
    assert deliver(sender, receiver, {"t": weight}).compared == 0
    weight[4] = 1
    assert deliver(sender, receiver, {"t": weight}).changed == 1
    sender.close()


def test_bucket_abandoned_half_way(rejects: Rejects, session: str) -> None:
    """An engine that stopped after the first tensor has no base for the second."""
    sender, receiver = new_pair(session)
    tensors = {"a": torch.zeros(100), "b": torch.zeros(100)}
    deliver(sender, receiver, tensors)
    tensors["a"][0], tensors["b"][0] = 1, 1
    metadata = sender.send(WeightBucket(list(tensors.items())))
    next(iter(receiver.receive(metadata)))
    sender.release(metadata)
    tensors["a"][1], tensors["b"][1] = 1, 1
    metadata = sender.send(WeightBucket(list(tensors.items())))
    with rejects(WeightSyncError, "delta-base-lost"):
        list(receiver.receive(metadata))
    sender.close()
