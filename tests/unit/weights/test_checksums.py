"""The hash that proves a weight sync: the formula of its module's docstring, and what it must notice.

The reference is that formula in Python's own integers, one word at a time. Not covered: resistance against
forgery, which it does not claim.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_like.weights.checksums import CHUNK_WORDS, tensor_checksum

MODULUS = 1 << 64


def splitmix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) % MODULUS
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % MODULUS
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB % MODULUS
    return value ^ (value >> 31)


def reference(data: bytes) -> int:
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
    total = len(data)
    for chunk in range(0, len(words), CHUNK_WORDS):
        chunk_hash = 0
        for position, word in enumerate(words[chunk : chunk + CHUNK_WORDS]):
            chunk_hash += (word ^ (word >> 32)) * (splitmix(position + 1) | 1)
        total += splitmix(chunk_hash + splitmix(chunk // CHUNK_WORDS))
    return splitmix(total)


@settings(max_examples=60, deadline=None)
@given(st.binary(min_size=1, max_size=300))
def test_equals_the_formula(data: bytes) -> None:
    assert tensor_checksum(torch.frombuffer(bytearray(data), dtype=torch.uint8)) == reference(data)


@pytest.mark.parametrize("words", [CHUNK_WORDS - 1, CHUNK_WORDS, CHUNK_WORDS + 1, 2 * CHUNK_WORDS + 3])
def test_equals_the_formula_around_chunk_boundaries(words: int) -> None:
    tensor = torch.randint(-(1 << 62), 1 << 62, (words,), generator=torch.Generator().manual_seed(words))
    assert tensor_checksum(tensor) == reference(tensor.numpy().tobytes())


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
