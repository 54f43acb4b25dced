"""The hash that proves a weight sync: the formula of its module's docstring, and what it must notice.

The reference for chunks is the library xxhash, which the form for accelerators shares nothing with; here that form runs
on the CPU. Not covered: resistance against forgery, which it does not claim.
"""

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from slime_like.weights import checksums
from slime_like.weights.checksums import tensor_checksum
from slime_like.weights.xxh3 import CHUNK_BYTES, chunk_hashes
from tests.support.properties import examples
from tests.unit.weights.formula import reference

CHUNK_WORDS = CHUNK_BYTES // 8


@examples(60)
@given(st.binary(min_size=1, max_size=300))
def test_equals_the_formula(data: bytes) -> None:
    assert tensor_checksum(torch.frombuffer(bytearray(data), dtype=torch.uint8)) == reference(data)


@pytest.mark.parametrize("words", [CHUNK_WORDS - 1, CHUNK_WORDS, CHUNK_WORDS + 1, 2 * CHUNK_WORDS + 3])
def test_equals_the_formula_around_chunk_boundaries(words: int) -> None:
    tensor = torch.randint(-(1 << 62), 1 << 62, (words,), generator=torch.Generator().manual_seed(words))
    assert tensor_checksum(tensor) == reference(tensor.numpy().tobytes())


@pytest.mark.parametrize("pattern", ["random", "zeros", "ones", "signs"])
def test_an_accelerator_s_arithmetic_is_the_library_s(pattern: str) -> None:
    """More chunks than one batch; lanes of all ones carry into every bit of the 128-bit products."""
    count = 2051 if pattern == "random" else 3
    fills = {"zeros": 0, "ones": 255, "signs": 0x80}
    chunks = torch.randint(0, 256, (count, CHUNK_BYTES), dtype=torch.uint8, generator=torch.Generator().manual_seed(4))
    if pattern in fills:
        chunks.fill_(fills[pattern])
    expected = [xxhash.xxh3_64_intdigest(chunk.numpy().tobytes()) for chunk in chunks]
    assert [value % (1 << 64) for value in chunk_hashes(chunks).tolist()] == expected


@pytest.mark.parametrize("count", [0, 5, CHUNK_BYTES - 1, CHUNK_BYTES, 3 * CHUNK_BYTES + 7])
@pytest.mark.parametrize("offset", [0, 1, 8])
def test_an_accelerator_hashes_whole_tensors_alike(count: int, offset: int) -> None:
    data = torch.randint(0, 256, (count + offset,), dtype=torch.uint8)[offset:]
    assert checksums._on_device(data) == checksums._on_host(data)


def test_empty_tensors_have_a_hash() -> None:
    assert tensor_checksum(torch.empty(0)) == reference(b"")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float64])
def test_depends_on_bytes_only(dtype: torch.dtype) -> None:
    tensor = (torch.randn(37, 13, generator=torch.Generator().manual_seed(0)) * 10).to(dtype)
    expected = reference(tensor.view(torch.uint8).numpy().tobytes())
    assert tensor_checksum(tensor) == expected
    assert tensor_checksum(tensor.t().contiguous().t()) == expected
    assert tensor_checksum(tensor.view(torch.uint8)) == expected
    assert tensor_checksum(torch.cat((tensor[:1], tensor))[1:]) == expected
    assert tensor_checksum(tensor.t()) != expected


def test_a_scalar_has_a_hash() -> None:
    assert tensor_checksum(torch.tensor(1.5)) == reference(torch.tensor([1.5]).numpy().tobytes())


def test_every_single_bit_counts() -> None:
    data = torch.randint(0, 256, (48,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    seen = {tensor_checksum(data)}
    for position in range(48):
        for bit in range(8):
            flipped = data.clone()
            flipped[position] ^= 1 << bit
            seen.add(tensor_checksum(flipped))
    assert len(seen) == 48 * 8 + 1


@pytest.mark.parametrize(("first", "second"), [(0, 1), (3, 200), (10, 250)])
def test_swapped_rows_show(first: int, second: int) -> None:
    tensor = torch.randn(256, 1024, generator=torch.Generator().manual_seed(2))
    swapped = tensor.clone()
    swapped[[first, second]] = tensor[[second, first]]
    assert tensor_checksum(swapped) != tensor_checksum(tensor)


def test_swapped_chunks_show() -> None:
    tensor = torch.randn(4, 2 * CHUNK_WORDS, generator=torch.Generator().manual_seed(2))
    assert tensor_checksum(tensor[[1, 0, 2, 3]]) != tensor_checksum(tensor)


def test_two_flipped_signs_do_not_cancel() -> None:
    """A plain weighted sum modulo 2**64 misses any even number of changed top bits."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        tensor = torch.randn(64, generator=torch.Generator().manual_seed(3)).to(dtype)
        negated = tensor.clone()
        last_of_word = 8 // dtype.itemsize - 1
        for word in (0, 5):
            negated[word * (8 // dtype.itemsize) + last_of_word] *= -1
        assert tensor_checksum(negated) != tensor_checksum(tensor)


def test_trailing_zeros_count() -> None:
    hashes = {tensor_checksum(torch.zeros(length, dtype=torch.uint8)) for length in range(40)}
    assert len(hashes) == 40


@pytest.mark.gpu
def test_same_on_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    for count in (5, CHUNK_WORDS + 3, 300 * CHUNK_WORDS):
        tensor = torch.randn(count)
        assert tensor_checksum(tensor.cuda()) == tensor_checksum(tensor)
