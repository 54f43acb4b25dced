"""The hash of weights against Python's integers, and tensors packed into a flat buffer."""

import json
import struct
from functools import cache
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from slime_like.errors import WeightSyncError
from slime_like.interfaces import BucketMetadata, TensorEntry, WeightBucket
from slime_like.weights import checksums
from slime_like.weights.checksums import copy_hashed, tensor_checksum, tensor_checksums
from slime_like.weights.received import Arrivals
from slime_like.weights.transport import ALIGNMENT, bucket_nbytes, read_bucket, write_bucket
from tests.support.properties import examples
from tests.support.rejections import Rejects

ROW = 16384
BLOCK = 4 * ROW
MASK = 2**64 - 1


def splitmix(state: int) -> int:
    """Return the generator's output for an advanced state."""
    value = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


@cache
def weights() -> list[int]:
    return [splitmix(0x9E3779B97F4A7C15 * (place + 1) & MASK) | 1 for place in range(4096)]


def reference(data: bytes) -> int:
    """Compute the formula with Python's integers."""
    total = len(data) * 0x9E3779B97F4A7C15
    for row, start in enumerate(range(0, len(data), ROW)):
        words = struct.unpack("<4096i", data[start : start + ROW].ljust(ROW, b"\0"))
        inner = sum(weight * word for weight, word in zip(weights(), words, strict=True) if word)
        total += splitmix((inner + (row + 1) * 0x9E3779B97F4A7C15) & MASK)
    return total & MASK


def noise(*shape: int) -> Tensor:
    return torch.randint(-100, 100, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(sum(shape)))


def test_the_generator_and_known_answers() -> None:
    """Its published first outputs for seed 0."""
    step = 0x9E3779B97F4A7C15
    first = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    assert [splitmix(step * (place + 1) & MASK) for place in range(3)] == first
    assert weights()[:3] == [each | 1 for each in first]
    # Hashes must not change unnoticed, because trainers and engines may run in different environments.
    assert tensor_checksum(torch.empty(0)) == 0
    assert tensor_checksum(torch.zeros(4, dtype=torch.uint8)) == 0x5AFE8F1F7847BE03
    assert tensor_checksum(torch.arange(10_000, dtype=torch.int32)) == 0x3603A8B84160B061


@examples(40)
@given(st.binary(max_size=300), st.sampled_from((0, ROW - 150, 2 * ROW)), st.sampled_from((0x00, 0x80, 0xFF)))
def test_equals_the_formula(data: bytes, filled: int, fill: int) -> None:
    """Including bytes around the boundaries of rows, and extreme words."""
    data = bytes([fill]) * filled + data
    assert tensor_checksum(torch.from_numpy(np.frombuffer(data, np.uint8).copy())) == reference(data)


@examples(30)
@given(st.lists(st.tuples(st.sampled_from((0, 5, ROW - 1, ROW, 3 * ROW + 7, 90 * ROW)), st.integers(0, 9))))
def test_tensors_hashed_together(kinds: list[tuple[int, int]]) -> None:
    """Any length and alignment, with batches of another size, as on a device."""
    data = [torch.randint(0, 256, (count + offset,), dtype=torch.uint8)[offset:] for count, offset in kinds]
    alone = [tensor_checksum(each.clone()) for each in data]
    with mock.patch.object(checksums, "_HOST_ROWS", 7):
        assert tensor_checksums(data) == alone


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float64])
def test_depends_on_bytes_only(dtype: torch.dtype) -> None:
    tensor = (torch.randn(37, 13, generator=torch.Generator().manual_seed(0)) * 10).to(dtype)
    expected = reference(tensor.view(torch.uint8).numpy().tobytes())
    assert tensor_checksum(tensor) == expected
    assert tensor_checksum(tensor.t().contiguous().t()) == expected
    assert tensor_checksum(tensor.view(torch.uint8)) == expected
    assert tensor_checksum(torch.cat((tensor[:1], tensor))[1:]) == expected
    assert tensor_checksum(tensor.t()) != expected
    assert tensor_checksum(tensor[0, 0]) == reference(tensor[0, :1].view(torch.uint8).numpy().tobytes())


def test_every_bit_its_position_and_the_length_count() -> None:
    """A weighted sum of 64-bit words modulo 2**64 would miss any even number of changed top bits."""
    data = torch.randint(0, 256, (48,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    flips = [data ^ (torch.arange(48) == place) * (1 << bit) for place in range(48) for bit in range(8)]
    signs = [data ^ torch.isin(torch.arange(48), torch.tensor(pair)) * 0x80 for pair in ((7, 15), (7, 47), (3, 7))]
    assert len({tensor_checksum(each) for each in (data, *flips, *signs)}) == 48 * 8 + 4
    assert len({tensor_checksum(torch.zeros(length, dtype=torch.uint8)) for length in range(40)}) == 40
    assert len({tensor_checksum(torch.zeros(rows * ROW, dtype=torch.uint8)) for rows in range(5)}) == 5


@pytest.mark.gpu
def test_same_on_cuda() -> None:
    tensors = [torch.randn(count) for count in (5, ROW // 8 + 3, 300 * ROW // 8)]
    assert tensor_checksums([tensor.cuda() for tensor in tensors]) == tensor_checksums(tensors)
    arrived = [torch.empty_like(tensor, device="cuda") for tensor in tensors]
    assert copy_hashed(tensors, arrived, of_targets=True)[0] == tensor_checksums(tensors)


@pytest.mark.parametrize("nbytes", [0, 1, ROW, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + ROW + 5])
@pytest.mark.parametrize("of_target", [False, True])
def test_copy_and_hash(nbytes: int, of_target: bool) -> None:
    source, target = noise(nbytes), torch.zeros(nbytes, dtype=torch.int8)
    (found,), hash_s = copy_hashed([source], [target], of_target)
    assert found == reference(source.numpy().tobytes())
    assert torch.equal(source, target)
    assert hash_s > 0


@pytest.mark.parametrize("of_target", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_target_of_another_kind(dtype: torch.dtype, of_target: bool) -> None:
    """The target has another dtype, and is a part of a wider matrix."""
    source, wide = noise(700, 30).bfloat16(), torch.zeros(700, 60, dtype=dtype)
    target = wide[:, :30]
    hashed = target if of_target else source
    (found,), _ = copy_hashed([source], [target], of_target)
    assert found == reference(hashed.contiguous().view(torch.uint8).numpy().tobytes())
    assert torch.equal(target.float(), source.float()) and not wide[:, 30:].any()


def test_target_of_another_shape() -> None:
    with pytest.raises(RuntimeError, match="size"):
        copy_hashed([noise(6, 4)], [torch.zeros(4, 6, dtype=torch.int8)])


@pytest.mark.parametrize("of_target", [False, True])
def test_failing_copy(monkeypatch: pytest.MonkeyPatch, of_target: bool) -> None:
    """The target's hash shows the failure. The source's hash is of the intended bytes."""
    source, target = noise(2 * BLOCK), torch.zeros(2 * BLOCK, dtype=torch.int8)
    copy = Tensor.copy_

    def wrong(into: Tensor, source: Tensor, **options: Any) -> Tensor:
        copy(into, source, **options)
        into[[BLOCK + 7, BLOCK + 9]] = into[[BLOCK + 9, BLOCK + 7]]
        return into

    source[BLOCK + 7] = source[BLOCK + 9] + 1
    monkeypatch.setattr(Tensor, "copy_", wrong)
    (found,), _ = copy_hashed([source], [target], of_target)
    assert (found != reference(source.numpy().tobytes())) == of_target


@pytest.mark.parametrize("way", ["copies", "load"])
def test_arrivals_are_verified(way: str, rejects: Rejects) -> None:
    sent = {"first": noise(100), "second": noise(BLOCK + 3)}
    entries = [_entry(name, tensor) for name, tensor in sent.items()]
    model = {name: torch.zeros(len(tensor)) for name, tensor in sent.items()}

    def arrive(arrivals: Arrivals) -> Any:
        if way == "copies":
            return arrivals.copies(entries, sent.items(), "cpu")
        arrivals.load(entries, sent.items(), model.__getitem__)
        return model.items()

    arrivals = Arrivals()
    for name, arrived in arrive(arrivals):
        assert torch.equal(arrived.float(), sent[name].float()) and arrived.data_ptr() != sent[name].data_ptr()
    assert arrivals.checksums == {each.name: each.checksum for each in entries}
    sent["second"][-1] += 1
    with rejects(WeightSyncError, "damaged-tensor"):
        arrive(Arrivals())


def _entry(name: str, tensor: Tensor) -> TensorEntry:
    data = tensor.numpy().tobytes()
    return TensorEntry(name, "int8", tuple(tensor.shape), 0, len(data), reference(data))


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float64]


@examples(40)
@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 7), max_size=3)), min_size=1, max_size=6))
def test_round_trip(kinds: list[tuple[torch.dtype, list[int]]]) -> None:
    """Tensors of any strides are stored in row-major order and read back as views."""
    strided = [(torch.randn(shape) * 9).to(dtype).permute([*range(len(shape))][::-1]) for dtype, shape in kinds]
    tensors = [(f"t{i}", tensor) for i, tensor in enumerate(strided)]
    buffer = torch.full((bucket_nbytes(WeightBucket(tensors)),), 255, dtype=torch.uint8)
    entries, _ = write_bucket(WeightBucket(tensors), buffer)
    for (name, tensor), (seen_name, seen), entry in zip(tensors, read_bucket(entries, buffer), entries, strict=True):
        assert (seen_name, seen.dtype, seen.shape) == (name, tensor.dtype, tensor.shape)
        assert torch.equal(seen, tensor)
        assert seen.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
        assert entry.offset % ALIGNMENT == 0
        assert entry.checksum == tensor_checksum(tensor) == tensor_checksum(seen)


def test_metadata_over_the_wire() -> None:
    entry = TensorEntry("t", "float32", (2, 3), 0, 24, 2**64 - 1)
    metadata = BucketMetadata("shared_memory", {"segment": "x.1", "nbytes": 64}, (entry,))
    assert BucketMetadata.from_wire(json.loads(json.dumps(metadata.to_wire()))) == metadata
