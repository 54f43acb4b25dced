"""A position-sensitive 64-bit hash of a tensor's bytes: the same number on every device, for every view of the bytes.

The bytes are read as little-endian 64-bit words, the last one filled with zeros. Words are taken in chunks of
``CHUNK_WORDS``; with all arithmetic modulo 2**64,

    chunk_hash[c] = sum_i fold(word[c, i]) * weight[i],       fold(x) = x ^ (x >> 32)
    hash          = mix(sum_c mix(chunk_hash[c] + mix(c)) + nbytes)

``weight[i] = mix(i + 1) | 1`` is odd and ``fold`` is one-to-one, so that no change of one word can vanish; the weight
depends on the position, so that a swap of two rows shows. ``fold`` carries a word's upper bits into its lower ones:
modulo 2**64 they would otherwise meet only a few bits of the weight, and two changed signs would cancel out. ``mix`` is
the finaliser of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014). The hash
finds damage and mix-ups; it is no protection against somebody who forges weights.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

CHUNK_WORDS = 65536
"""Words per chunk: with its products, small enough for a core's cache."""

_DEVICE_CHUNKS = 64
"""Chunks hashed by one kernel on an accelerator, where launches and not caches are the limit."""

_MASK = (1 << 64) - 1
_HALF = np.uint64(32)
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def tensor_checksum(tensor: Tensor) -> int:
    """Hash of ``tensor``'s bytes in row-major order, in [0, 2**64).

    Shape and dtype do not enter: only bytes, their positions, and their number.
    """
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    total = data.numel()
    for index, chunk_hash in enumerate(_hash_chunks(_as_words(data))):
        total += _mix_int(chunk_hash + _mix_int(index))
    return _mix_int(total)


def mix(value: Tensor) -> Tensor:
    """SplitMix64's finaliser on int64 tensors, elementwise; the sign bit is an ordinary bit, and the result has 64."""
    value = value + _signed(_GOLDEN)
    value = (value ^ _shift_right(value, 30)) * _signed(_MULTIPLIERS[0])
    value = (value ^ _shift_right(value, 27)) * _signed(_MULTIPLIERS[1])
    return value ^ _shift_right(value, 31)


def _as_words(data: Tensor) -> Tensor:
    """(n,) uint8 as (ceil(n / 8),) int64, copied only where length or alignment forbids a view."""
    whole = data.numel() // 8 * 8
    if whole == data.numel() and data.data_ptr() % 8 == 0 and data.storage_offset() % 8 == 0:
        return data.view(torch.int64)
    padded = torch.zeros((data.numel() + 7) // 8 * 8, dtype=torch.uint8, device=data.device)
    padded[: data.numel()] = data
    return padded.view(torch.int64)


def _hash_chunks(words: Tensor) -> list[int]:
    """ceil(len(words) / CHUNK_WORDS) hashes; the last chunk may be short."""
    weights = _position_weights(words.device)
    whole = words.numel() // CHUNK_WORDS * CHUNK_WORDS
    rows_at_once = 1 if words.device.type == "cpu" else _DEVICE_CHUNKS
    parts = list(words[:whole].view(-1, CHUNK_WORDS).split(rows_at_once)) if whole else []
    hashes: list[Tensor] = []
    if parts:
        scratch = torch.empty_like(parts[0])
        hashes = [_weighted_sums(part, weights, scratch[: len(part)]) for part in parts]
    rest = words[whole:]
    if rest.numel():
        hashes.append(_weighted_sums(rest[None], weights[: rest.numel()], torch.empty_like(rest)[None]))
    return torch.cat(hashes).tolist() if hashes else []


def _weighted_sums(rows: Tensor, weights: Tensor, folded: Tensor) -> Tensor:
    """(len(rows),) int64; ``folded`` is scratch space of the rows' shape."""
    if len(rows) == 1 and rows.device.type == "cpu":
        return _weighted_sum_on_cpu(rows[0], weights, folded[0])[None]
    torch.bitwise_right_shift(rows, 32, out=folded)
    folded.bitwise_and_(0xFFFFFFFF).bitwise_xor_(rows)  # torch's shift copies the sign bit
    return torch.mul(folded, weights, out=folded).sum(dim=1)


def _weighted_sum_on_cpu(row: Tensor, weights: Tensor, folded: Tensor) -> Tensor:
    """The same in three passes instead of five: numpy shifts logically, and torch multiplies and adds at once."""
    own, words = folded.numpy().view(np.uint64), row.numpy().view(np.uint64)
    np.right_shift(words, _HALF, out=own)
    np.bitwise_xor(own, words, out=own)
    return torch.dot(folded, weights)


@cache
def _position_weights(device: torch.device) -> Tensor:
    """(CHUNK_WORDS,) int64 odd weights, different at every position: constants, computed once per device."""
    return mix(torch.arange(1, CHUNK_WORDS + 1, dtype=torch.int64, device=device)) | 1


def _mix_int(value: int) -> int:
    """The same on a Python integer, taken modulo 2**64."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * _MULTIPLIERS[0]) & _MASK
    value = ((value ^ (value >> 27)) * _MULTIPLIERS[1]) & _MASK
    return value ^ (value >> 31)


def _shift_right(value: Tensor, bits: int) -> Tensor:
    """Logical shift; torch's own copies the sign bit."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
