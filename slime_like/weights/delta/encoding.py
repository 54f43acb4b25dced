"""The elements of a tensor that differ from an earlier copy, as bytes.

Elements are compared as integers: a NaN equals itself, and -0.0 is not 0.0. They are taken in blocks of ``BLOCK``, so
that a place in a block is a 16-bit number:

    values   (k,) the new elements, in order
    offsets  (k,) uint16, their places in their blocks
    counts   (blocks,) int32, how many fall into each

each part filled up to a multiple of 8 bytes. ``k`` and the tensor's shape travel with the metadata.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from slime_like.errors import WeightSyncError

BLOCK = 65536
_GROUP = 16 * BLOCK
"""Elements compared at once: few enough for a cache, enough to make calls cheap."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(slots=True)
class HeldTensor:
    """What a receiver holds of one tensor, on either side: the copy and its checksum."""

    tensor: Tensor
    checksum: int


def as_integers(tensor: Tensor) -> Tensor:
    """(n,) a view of a contiguous tensor's elements as integers of their size."""
    if tensor.element_size() not in _INTEGERS:
        raise WeightSyncError(
            f"elements of {tensor.dtype} cannot be compared",
            code="delta-dtype",
            who="sync.delta",
            remedy="set sync.delta: never",
        )
    return tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()])


def changes_nbytes(count: int, elements: int, element_size: int) -> int:
    """Bytes of ``count`` changes among ``elements``."""
    return _padded(count * element_size) + _padded(2 * count) + _padded(4 * _blocks(elements))


def find_changes(new: Tensor, base: Tensor) -> Tensor:
    """(k,) int64, ascending: where two integer tensors of one length differ."""
    groups = zip(new.split(_GROUP), base.split(_GROUP), strict=True)
    found = [_differences(words, other) + index * _GROUP for index, (words, other) in enumerate(groups)]
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device=new.device)


def encode_changes(new: Tensor, places: Tensor) -> Tensor:
    """(n,) uint8: the elements of integer tensor ``new`` at ``places`` (ascending)."""
    counts = torch.bincount(places // BLOCK, minlength=_blocks(new.numel())).to(torch.int32)
    parts = (new[places], (places % BLOCK).to(torch.uint16), counts)
    encoded = new.new_zeros(changes_nbytes(len(places), new.numel(), new.element_size()), dtype=torch.uint8)
    start = 0
    for part in parts:
        data = part.view(torch.uint8)
        encoded[start : start + data.numel()] = data
        start += _padded(data.numel())
    return encoded


def apply_changes(base: Tensor, encoded: Tensor, count: int) -> None:
    """Overwrite integer tensor ``base`` at the places that ``encoded`` names.

    Raises:
        WeightSyncError: the bytes are none that ``encode_changes`` makes for a tensor of this size.
    """
    if encoded.numel() != changes_nbytes(count, base.numel(), base.element_size()):
        raise _damaged(f"{count} changes of {base.numel()} elements cannot be {encoded.numel()} bytes")
    values, rest = _part(encoded, count * base.element_size())
    offsets, rest = _part(rest, 2 * count)
    counts, _ = _part(rest, 4 * _blocks(base.numel()))
    starts = torch.arange(_blocks(base.numel()), device=base.device) * BLOCK
    repeats = counts.view(torch.int32).long()
    if int(repeats.sum()) != count or bool((repeats < 0).any()):
        raise _damaged(f"the blocks of {count} changes hold {int(repeats.sum())}")
    places = starts.repeat_interleave(repeats) + offsets.view(torch.uint16).long()
    if count and int(places.max()) >= base.numel():
        raise _damaged(f"a change at element {int(places.max())} of {base.numel()}")
    base[places] = values.view(base.dtype)


def _damaged(problem: str) -> WeightSyncError:
    return WeightSyncError(problem, code="damaged-changes")


def _differences(new: Tensor, base: Tensor) -> Tensor:
    """(k,) int64. By words of 8 bytes first, where there are any: most hold no change."""
    per_word = 8 // new.element_size()
    if not (_has_words(new, per_word) and _has_words(base, per_word)):
        return (new != base).nonzero().flatten()
    words, others = new.view(torch.int64), base.view(torch.int64)
    changed = (words != others).nonzero().flatten()
    values, other = words[changed].view(new.dtype), others[changed].view(new.dtype)
    places = (changed[:, None] * per_word + torch.arange(per_word, device=new.device)).flatten()
    return places[values != other]


def _has_words(data: Tensor, per_word: int) -> bool:
    return data.numel() % per_word == data.storage_offset() % per_word == data.data_ptr() % 8 == 0


def _part(data: Tensor, nbytes: int) -> tuple[Tensor, Tensor]:
    return data[:nbytes], data[_padded(nbytes) :]


def _blocks(elements: int) -> int:
    return -(-elements // BLOCK)


def _padded(nbytes: int) -> int:
    return -(-nbytes // 8) * 8
