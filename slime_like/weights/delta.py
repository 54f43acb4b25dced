"""Sparse weight sync: send only the elements that changed since the last sync. The result is bit-identical.

In 16-bit formats, one step at a small learning rate leaves most weights unchanged: the step is smaller than half the
distance to the next representable number.

For each tensor, the elements that differ from an earlier copy are sent. They are compared as integers: a NaN equals
itself, and -0.0 is not 0.0. Positions are relative to blocks of ``BLOCK`` elements, so each fits in 16 bits:

    values   (k,) the new elements, in order
    offsets  (k,) uint16, positions within the blocks
    counts   (blocks,) int32, number of changes in each block

Each part is padded to a multiple of 8 bytes. ``k`` and the tensor's shape are sent with the metadata.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slime_like.errors import WeightSyncError
from slime_like.interfaces import BucketMetadata, TensorEntry, WeightBucket
from slime_like.weights.checksums import timed_checksum
from slime_like.weights.transport import BASE_LOST, Receiver, Sender, describe, place_tensors

BLOCK = 65536
_GROUP = 16 * BLOCK
"""Elements compared at a time: few enough for a cache, enough to make calls cheap."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Marker inside the message, because engines pass on their workers' errors as text."""


@dataclass(slots=True)
class HeldTensor:
    """A copy of one tensor as a receiver holds it, and its checksum. The sender keeps the same record."""

    tensor: Tensor
    checksum: int


def as_integers(tensor: Tensor) -> Tensor:
    """View a contiguous tensor's elements as (n,) integers of the same size."""
    return tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()])


def changes_nbytes(count: int, elements: int, element_size: int) -> int:
    """Return the encoded size in bytes of ``count`` changes among ``elements``."""
    return _padded(count * element_size) + _padded(2 * count) + _padded(4 * _blocks(elements))


def find_changes(new: Tensor, base: Tensor) -> Tensor:
    """Return the positions where two integer tensors of the same length differ, (k,) int64, ascending."""
    groups = zip(new.split(_GROUP), base.split(_GROUP), strict=True)
    found = [_differences(words, other) + index * _GROUP for index, (words, other) in enumerate(groups)]
    return torch.cat(found) if found else torch.empty(0, dtype=torch.int64, device=new.device)


def encode_changes(new: Tensor, places: Tensor) -> Tensor:
    """Encode the elements of integer tensor ``new`` at ``places`` (ascending) as (n,) uint8."""
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
    """Overwrite integer tensor ``base`` at the ``count`` positions in ``encoded``."""
    values, rest = _part(encoded, count * base.element_size())
    offsets, rest = _part(rest, 2 * count)
    counts, _ = _part(rest, 4 * _blocks(base.numel()))
    starts = torch.arange(_blocks(base.numel()), device=base.device) * BLOCK
    places = starts.repeat_interleave(counts.view(torch.int32).long()) + offsets.view(torch.uint16).long()
    base[places] = values.view(base.dtype)


def _differences(new: Tensor, base: Tensor) -> Tensor:
    """Return the positions that differ, (k,) int64. Compares 8-byte words first if possible: most hold no change."""
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


# --------------------------------------------------------------------------------------------------------------- sender
@dataclass(frozen=True, slots=True)
class _Outgoing:
    """One tensor and how it is sent: whole if it has no base or if too much of it changed.

    Attributes:
        base: the receivers' copy.
        places: (k,) positions that differ from the base; ``None`` without a base.
        changes: (n,) uint8, sent instead of the tensor; ``None`` if that saves nothing.
    """

    name: str
    tensor: Tensor
    offset: int
    base: HeldTensor | None = None
    places: Tensor | None = None
    changes: Tensor | None = None

    @property
    def payload(self) -> Tensor:
        return self.tensor if self.changes is None else self.changes

    @property
    def num_changes(self) -> int | None:
        return None if self.changes is None or self.places is None else len(self.places)

    def entry(self, sent: TensorEntry) -> tuple[TensorEntry, float]:
        """Return the whole tensor's entry. Hashes it only if neither ``sent`` nor the base has the same bytes."""
        if self.changes is None:
            return sent, 0.0
        if self.base is not None and self.num_changes == 0:
            return describe(self.name, self.tensor, self.offset, self.base.checksum), 0.0
        checksum, hash_s = timed_checksum(self.tensor)
        return describe(self.name, self.tensor, self.offset, checksum), hash_s


class DeltaSender:
    """Sender through ``inner``, with a copy of every sent tensor in host memory.

    ``metadata.entries`` describe the whole tensors, including checksums; ``metadata.location`` describes what is sent.
    Every change names the checksum of its base, so a receiver with a different base notices. After a failed sync, the
    receivers' copies are unknown: open a new sender, which starts without any.
    """

    def __init__(self, inner: Sender) -> None:
        self._inner = inner
        self._bases: dict[str, HeldTensor] = {}

    def rendezvous(self) -> dict[str, Any]:
        return {"delta": self._inner.rendezvous()}

    def send(self, bucket: WeightBucket) -> BucketMetadata:
        outgoing = [self._compare(name, tensor.cpu(), offset) for name, tensor, offset in place_tensors(bucket)]
        inner = self._inner.send(WeightBucket([(out.name, out.payload) for out in outgoing]))
        described = [out.entry(sent) for out, sent in zip(outgoing, inner.entries, strict=True)]
        location = {
            "inner": inner.to_wire(),
            "sender": inner.location.get("sender"),
            "changes": [out.num_changes for out in outgoing],
            "bases": [0 if out.base is None else out.base.checksum for out in outgoing],
        }
        for out, (entry, _) in zip(outgoing, described, strict=True):
            self._remember(out, entry)
        return BucketMetadata(
            inner.transport,
            location,
            tuple(entry for entry, _ in described),
            hash_s=inner.hash_s + sum(seconds for _, seconds in described),
            saved_nbytes=sum(out.tensor.nbytes - out.payload.nbytes for out in outgoing),
            compared=sum(out.tensor.numel() for out in outgoing if out.places is not None),
            changed=sum(len(out.places) for out in outgoing if out.places is not None),
        )

    def release(self, metadata: BucketMetadata) -> None:
        self._inner.release(BucketMetadata.from_wire(metadata.location["inner"]))

    def rest(self) -> None:
        self._inner.rest()

    def close(self) -> None:
        self._bases.clear()
        self._inner.close()

    def _compare(self, name: str, tensor: Tensor, offset: int) -> _Outgoing:
        base = self._bases.get(name)
        if base is None or base.tensor.shape != tensor.shape or base.tensor.dtype != tensor.dtype:
            return _Outgoing(name, tensor, offset)
        new = as_integers(tensor)
        places = find_changes(new, as_integers(base.tensor))
        smaller = changes_nbytes(len(places), new.numel(), new.element_size()) < tensor.nbytes
        changes = encode_changes(new, places) if smaller else None
        return _Outgoing(name, tensor, offset, base, places, changes)

    def _remember(self, out: _Outgoing, entry: TensorEntry) -> None:
        if out.base is None or out.places is None:
            self._bases[out.name] = HeldTensor(out.tensor.clone(), entry.checksum)
            return
        as_integers(out.base.tensor)[out.places] = as_integers(out.tensor)[out.places]
        out.base.checksum = entry.checksum


# ------------------------------------------------------------------------------------------------------------- receiver
class DeltaReceiver:
    """Receiver with a copy of every tensor in host memory. The whole tensors it yields are views of these copies.

    A wrong copy is always detected: changes are rejected if the copy's checksum differs from the sender's, and the
    receiver compares the hash of the result with the entry.
    """

    def __init__(self, inner: Receiver) -> None:
        self._inner = inner
        self._held: dict[str, HeldTensor] = {}

    def receive(self, metadata: BucketMetadata) -> Iterator[tuple[str, Tensor]]:
        location = metadata.location
        payloads = self._inner.receive(BucketMetadata.from_wire(location["inner"]))
        parts = zip(metadata.entries, location["changes"], location["bases"], payloads, strict=True)
        for entry, changes, base, (_, payload) in parts:
            # Until the copy matches its entry, nothing may be built on it.
            held = self._held.pop(entry.name, None)
            whole = changes is None
            tensor = payload.to("cpu", copy=True) if whole else _changed(entry, held, base, payload, changes)
            self._held[entry.name] = HeldTensor(tensor, entry.checksum)
            yield entry.name, tensor

    def rest(self) -> None:
        self._inner.rest()

    def close(self) -> None:
        self._held.clear()
        self._inner.close()


def _changed(entry: TensorEntry, held: HeldTensor | None, base: int, payload: Tensor, changes: int) -> Tensor:
    if held is None or held.checksum != base or tuple(held.tensor.shape) != entry.shape:
        raise WeightSyncError(
            f"{BASE_LOST}: the changes are for {base:#018x}, but the receiver has "
            f"{'nothing' if held is None else f'{held.checksum:#018x}'}",
            code="delta-base-lost",
            who=f"tensor {entry.name}",
            remedy="the next sync must send everything",
        )
    apply_changes(as_integers(held.tensor), payload.cpu(), changes)
    return held.tensor
