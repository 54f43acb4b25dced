"""The hash that proves a weight sync: the formula of its module's docstring, alone and while a tensor is copied.

The reference is the library xxhash, which the form for accelerators shares nothing with; here that form runs on the
CPU. Not covered: resistance against forgery, which it does not claim.
"""

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from slime_like.errors import WeightSyncError
from slime_like.interfaces import TensorEntry
from slime_like.weights import checksums, xxh3
from slime_like.weights.checksums import copy_hashed, tensor_checksum, tensor_checksums
from slime_like.weights.received import Arrivals
from slime_like.weights.xxh3 import CHUNK_BYTES, chunk_hashes
from tests.support.properties import examples
from tests.support.rejections import Rejects

CHUNK = 16384
BLOCK = 16 * CHUNK


def reference(data: bytes) -> int:
    """XXH3 of the chunks' XXH3 and the number of bytes, with the library xxhash alone."""
    tree = xxhash.xxh3_64()
    for start in range(0, len(data), CHUNK):
        tree.update(xxhash.xxh3_64_intdigest(data[start : start + CHUNK]).to_bytes(8, "little"))
    tree.update(len(data).to_bytes(8, "little"))
    return tree.intdigest()


def noise(*shape: int) -> Tensor:
    return torch.randint(-100, 100, shape, dtype=torch.int8, generator=torch.Generator().manual_seed(sum(shape)))


@examples(60)
@given(st.binary(min_size=0, max_size=300), st.sampled_from((0, CHUNK - 150, 2 * CHUNK)))
def test_equals_the_formula(data: bytes, zeros: int) -> None:
    """Also around the boundaries of chunks."""
    data = bytes(zeros) + data
    assert tensor_checksum(torch.from_numpy(np.frombuffer(data, np.uint8).copy())) == reference(data)


@pytest.mark.parametrize("pattern", ["random", "zeros", "ones", "signs"])
def test_an_accelerator_s_arithmetic_is_the_library_s(pattern: str) -> None:
    """More chunks than one batch; lanes of all ones carry into every bit of the 128-bit products."""
    count = 2051 if pattern == "random" else 3
    fills = {"zeros": 0, "ones": 255, "signs": 0x80}
    chunks = torch.randint(0, 256, (count, CHUNK_BYTES), dtype=torch.uint8, generator=torch.Generator().manual_seed(4))
    if pattern in fills:
        chunks.fill_(fills[pattern])
    expected = [xxhash.xxh3_64_intdigest(chunk.numpy().tobytes()) for chunk in chunks]
    assert [value % (1 << 64) for value in chunk_hashes([chunks]).tolist()] == expected


@examples(30)
@given(st.lists(st.tuples(st.sampled_from((0, 5, CHUNK - 1, CHUNK, 3 * CHUNK + 7, 90 * CHUNK)), st.integers(0, 9))))
def test_an_accelerator_hashes_tensors_together_as_each_alone(kinds: list[tuple[int, int]]) -> None:
    """Of any length and alignment, in several batches."""
    data = [torch.randint(0, 256, (count + offset,), dtype=torch.uint8)[offset:] for count, offset in kinds]
    with mock.patch.object(xxh3, "_BATCH_CHUNKS", 64):
        found = checksums._on_device(data)
    trees = [checksums.checksum_of_chunks(hashes, len(each)) for hashes, each in zip(found, data, strict=True)]
    assert trees == [reference(each.numpy().tobytes()) for each in data] == tensor_checksums(data)


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


def test_every_bit_its_place_and_the_length_count() -> None:
    """A plain weighted sum modulo 2**64 would miss any even number of changed top bits."""
    data = torch.randint(0, 256, (48,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    flips = [data ^ (torch.arange(48) == place) * (1 << bit) for place in range(48) for bit in range(8)]
    signs = [data ^ torch.isin(torch.arange(48), torch.tensor(pair)) * 0x80 for pair in ((7, 15), (7, 47))]
    assert len({tensor_checksum(each) for each in (data, *flips, *signs)}) == 48 * 8 + 3
    rows = noise(4, 2 * CHUNK)
    assert tensor_checksum(rows[[1, 0, 2, 3]]) != tensor_checksum(rows)
    assert len({tensor_checksum(torch.zeros(length, dtype=torch.uint8)) for length in range(40)}) == 40


@pytest.mark.gpu
def test_same_on_cuda() -> None:
    tensors = [torch.randn(count) for count in (5, CHUNK // 8 + 3, 300 * CHUNK // 8)]
    assert tensor_checksums([tensor.cuda() for tensor in tensors]) == tensor_checksums(tensors)
    arrived = [torch.empty_like(tensor, device="cuda") for tensor in tensors]
    assert copy_hashed(tensors, arrived, of_targets=True)[0] == tensor_checksums(tensors)


# --------------------------------------------------------------------------------------------------- while it is copied
@pytest.mark.parametrize("nbytes", [0, 1, CHUNK, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + CHUNK + 5])
@pytest.mark.parametrize("of_target", [False, True])
def test_a_copy_is_whole_and_its_hash_the_formula_s(nbytes: int, of_target: bool) -> None:
    source, target = noise(nbytes), torch.zeros(nbytes, dtype=torch.int8)
    (found,), hash_s = copy_hashed([source], [target], of_target)
    assert found == reference(source.numpy().tobytes())
    assert torch.equal(source, target)
    assert (hash_s > 0) == (nbytes > 0)


@pytest.mark.parametrize("of_target", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_target_of_another_kind(dtype: torch.dtype, of_target: bool) -> None:
    """Another dtype, and a part of a wider matrix."""
    source, wide = noise(700, 30).bfloat16(), torch.zeros(700, 60, dtype=dtype)
    target = wide[:, :30]
    hashed = target if of_target else source
    (found,), _ = copy_hashed([source], [target], of_target)
    assert found == reference(hashed.contiguous().view(torch.uint8).numpy().tobytes())
    assert torch.equal(target.float(), source.float()) and not wide[:, 30:].any()


def test_a_target_of_another_shape_is_refused() -> None:
    with pytest.raises(RuntimeError, match="size"):
        copy_hashed([noise(6, 4)], [torch.zeros(4, 6, dtype=torch.int8)])


@pytest.mark.parametrize("of_target", [False, True])
def test_a_copy_that_fails(monkeypatch: pytest.MonkeyPatch, of_target: bool) -> None:
    """The target's hash tells, in any block; the source's says what was to be copied."""
    source, target = noise(2 * BLOCK), torch.zeros(2 * BLOCK, dtype=torch.int8)
    copyto = np.copyto

    def wrong(into: np.ndarray, block: np.ndarray) -> None:
        copyto(into, block)
        if np.shares_memory(block, source[BLOCK:].numpy()):
            into[[7, 9]] = into[[9, 7]]

    source[BLOCK + 7] = source[BLOCK + 9] + 1
    monkeypatch.setattr(checksums.np, "copyto", wrong)
    (found,), _ = copy_hashed([source], [target], of_target)
    assert (found != reference(source.numpy().tobytes())) == of_target


@pytest.mark.parametrize("way", ["copies", "load"])
def test_what_arrives_is_what_was_sent_or_rejected(way: str, rejects: Rejects) -> None:
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
