"""XXH3-64 of many chunks of one size at once, in torch's integer arithmetic: for accelerators.

After the specification (https://github.com/Cyan4973/xxHash, doc/xxhash_spec.md, XXH3 for large inputs, no seed). A
chunk is blocks of 16 stripes of 8 lanes, 64-bit words each. Within a block stripes are summed, which is done for all at
once; from block to block eight accumulators are scrambled, which is sequential. All arithmetic is modulo 2**64 on
int64, whose sign bit is an ordinary bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

CHUNK_BYTES = 16384
"""16 blocks: few enough steps in turn for an accelerator, and enough bytes that a CPU's call per chunk costs little."""

_BATCH_CHUNKS = 2048
"""Chunks hashed together, 32 MiB: bounds what intermediate values take."""

_LANES, _STRIPES = 8, 16
_BLOCKS = CHUNK_BYTES // (8 * _LANES * _STRIPES)
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221b8084674f743248e"
    "e03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8a8fa763fe39c343ff9dcbbc7c70b4f1d"
    "8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc"
    "8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_PRIME32 = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D)
_PRIME64 = (0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5)
_START = (_PRIME32[2], *_PRIME64[:4], _PRIME32[1], _PRIME64[4], _PRIME32[0])
_AVALANCHE = 0x165667919E3779F9
_LOW = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class _Keys:
    """Words of the secret, from the bytes where the specification takes them, and the accumulators' first values.

    Attributes:
        stripes: (16, 8), of every stripe in a block.
        scramble, last, merge, start: (8,); ``last`` is that of a chunk's last stripe.
    """

    stripes: Tensor
    scramble: Tensor
    last: Tensor
    merge: Tensor
    start: Tensor

    @classmethod
    @cache
    def on(cls, device: torch.device) -> _Keys:
        def words(first: int) -> Tensor:
            return torch.from_numpy(np.frombuffer(_SECRET, "<i8", _LANES, first).copy()).to(device)

        end = len(_SECRET) - 8 * _LANES
        stripes = torch.stack([words(8 * stripe) for stripe in range(_STRIPES)])
        start = torch.tensor([_signed(value) for value in _START], device=device)
        return cls(stripes, words(end), words(end - 7), words(11), start)


def chunk_hashes(parts: Sequence[Tensor]) -> Tensor:
    """(n,) int64, whose bits are the hashes, of all chunks; each part is (m, CHUNK_BYTES) uint8."""
    return torch.cat([_hashes(_words(batch)) for batch in _batches(parts)])


def _batches(parts: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Parts, and pieces of them, of at most ``_BATCH_CHUNKS`` in all."""
    batch: list[Tensor] = []
    for piece in (piece for part in parts for piece in part.split(_BATCH_CHUNKS)):
        if sum(map(len, batch)) + len(piece) > _BATCH_CHUNKS:
            yield batch
            batch = []
        batch.append(piece)
    yield batch


def _words(batch: Sequence[Tensor]) -> Tensor:
    """(n, blocks, stripes, lanes) of the batch's chunks, which are copied unless they are one aligned piece."""
    chunks = batch[0]
    if len(batch) > 1 or chunks.data_ptr() % 8 or chunks.storage_offset() % 8:
        chunks = torch.cat(list(batch))
    return chunks.view(torch.int64).view(-1, _BLOCKS, _STRIPES, _LANES)


def _hashes(words: Tensor) -> Tensor:
    """(n,) of (n, blocks, stripes, lanes)."""
    keys = _Keys.on(words.device)
    stripes = _mixed(words, keys.stripes)
    lanes = keys.start
    for block in stripes[:, :-1].sum(dim=2).unbind(dim=1):
        lanes = lanes + block
        lanes = (lanes ^ _shifted(lanes, 47) ^ keys.scramble) * _PRIME32[0]
    # The last block is not scrambled, and the chunk's last stripe has a separate key.
    lanes = lanes + stripes[:, -1, :-1].sum(dim=1) + _mixed(words[:, -1, -1], keys.last)
    return _merged(lanes, keys.merge)


def _mixed(words: Tensor, keys: Tensor) -> Tensor:
    """Addends of (..., lanes) words to the accumulators: a 32 by 32 bit product, and the neighbouring lane's word."""
    keyed = words ^ keys
    product = (keyed & _LOW) * _shifted(keyed, 32)
    return product.add_(words.unflatten(-1, (-1, 2)).flip(-1).flatten(-2))


def _merged(lanes: Tensor, keys: Tensor) -> Tensor:
    """(n,) of (n, lanes): four folded 128-bit products, added up and mixed."""
    first, second = (lanes ^ keys).unflatten(-1, (-1, 2)).unbind(dim=-1)
    total = _folded(first, second).sum(dim=-1) + _signed(CHUNK_BYTES * _PRIME64[0] % (1 << 64))
    total = (total ^ _shifted(total, 37)) * _AVALANCHE
    return total ^ _shifted(total, 32)


def _folded(first: Tensor, second: Tensor) -> Tensor:
    """Lower ^ upper half of the 128-bit product of two unsigned 64-bit numbers."""
    low, high = (first & _LOW, second & _LOW), (_shifted(first, 32), _shifted(second, 32))
    inner = high[0] * low[1] + _shifted(low[0] * low[1], 32)
    outer = low[0] * high[1] + (inner & _LOW)
    upper = high[0] * high[1] + _shifted(inner, 32) + _shifted(outer, 32)
    return (first * second) ^ upper


def _shifted(value: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; torch's own copies the sign bit."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value
