"""A sender that remembers what its receivers hold, and sends what is different."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from slime_like.interfaces import BucketFigures, BucketMetadata, TensorEntry, WeightBucket
from slime_like.weights.buckets import entry_of, place_tensors, tensor_nbytes
from slime_like.weights.delta.encoding import as_integers, changes_nbytes, encode_changes, find_changes
from slime_like.weights.stopwatch import Stopwatch
from slime_like.weights.transport import Sender
from slime_like.weights.wire import metadata_from_wire, metadata_to_wire


@dataclass(slots=True)
class _Base:
    """The receivers' copy of one tensor, and its checksum."""

    tensor: Tensor
    checksum: int


@dataclass(frozen=True, slots=True)
class _Outgoing:
    """One tensor and how it travels: as a whole without a base, or where too much of it has changed.

    Attributes:
        places: (k,) where it differs from its base; ``None`` without one.
        changes: (n,) uint8, what is sent instead of the tensor; ``None`` if that would be no less.
    """

    name: str
    tensor: Tensor
    offset: int
    base: _Base | None = None
    places: Tensor | None = None
    changes: Tensor | None = None

    @property
    def payload(self) -> Tensor:
        return self.tensor if self.changes is None else self.changes

    @property
    def num_changes(self) -> int | None:
        return None if self.changes is None or self.places is None else len(self.places)

    def entry(self, sent: TensorEntry, hashing: Stopwatch) -> TensorEntry:
        """That of the whole tensor; hashed only if neither what was ``sent`` nor the base has the same bytes."""
        if self.changes is None:
            return sent
        if self.base is not None and self.num_changes == 0:
            dtype, shape = str(self.tensor.dtype).removeprefix("torch."), tuple(self.tensor.shape)
            nbytes = tensor_nbytes(self.tensor)
            return TensorEntry(self.name, dtype, shape, self.offset, nbytes, self.base.checksum)
        return entry_of(self.name, self.tensor, self.offset, hashing)


class DeltaSender:
    """Sends through ``inner``. Keeps a copy, in host memory, of every tensor it has sent.

    ``metadata.entries`` describe the whole tensors, checksums included; what travels is in ``metadata.location``.
    Every change names the checksum of the tensor it is made for, so that a receiver that holds another one notices.
    After a failed sync the receivers' copies are unknown: open a new sender, which has sent nothing yet.
    """

    def __init__(self, inner: Sender) -> None:
        self._inner = inner
        self._bases: dict[str, _Base] = {}

    def rendezvous(self) -> dict[str, Any]:
        return {"delta": self._inner.rendezvous()}

    def send(self, bucket: WeightBucket) -> BucketMetadata:
        outgoing = [self._compare(name, tensor.cpu(), offset) for name, tensor, offset in place_tensors(bucket)]
        inner = self._inner.send(WeightBucket([(out.name, out.payload) for out in outgoing]))
        hashing = Stopwatch()
        entries = tuple(out.entry(sent, hashing) for out, sent in zip(outgoing, inner.entries, strict=True))
        location = {
            "inner": metadata_to_wire(inner),
            "sender": inner.location.get("sender"),
            "changes": [out.num_changes for out in outgoing],
            "bases": [0 if out.base is None else out.base.checksum for out in outgoing],
        }
        compared = [out for out in outgoing if out.places is not None]
        figures = BucketFigures(
            wire_nbytes=inner.figures.wire_nbytes,
            changed=sum(len(out.places) for out in compared if out.places is not None),
            elements=sum(out.tensor.numel() for out in compared),
            hash_s=hashing.seconds + inner.figures.hash_s,
        )
        for out, entry in zip(outgoing, entries, strict=True):
            self._remember(out, entry)
        return BucketMetadata(inner.transport, location, entries, figures)

    def release(self, metadata: BucketMetadata) -> None:
        self._inner.release(metadata_from_wire(metadata.location["inner"]))

    def close(self) -> None:
        self._bases.clear()
        self._inner.close()

    def _compare(self, name: str, tensor: Tensor, offset: int) -> _Outgoing:
        base = self._bases.get(name)
        if base is None or base.tensor.shape != tensor.shape or base.tensor.dtype != tensor.dtype:
            return _Outgoing(name, tensor, offset)
        new = as_integers(tensor)
        places = find_changes(new, as_integers(base.tensor))
        smaller = changes_nbytes(len(places), new.numel(), new.element_size()) < tensor_nbytes(tensor)
        changes = encode_changes(new, places) if smaller else None
        return _Outgoing(name, tensor, offset, base, places, changes)

    def _remember(self, out: _Outgoing, entry: TensorEntry) -> None:
        if out.base is None or out.places is None:
            self._bases[out.name] = _Base(out.tensor.clone(), entry.checksum)
            return
        as_integers(out.base.tensor)[out.places] = as_integers(out.tensor)[out.places]
        out.base.checksum = entry.checksum
