"""A sender that remembers what its receivers hold, and sends what is different."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from slime_like.interfaces import BucketMetadata, TensorEntry, WeightBucket
from slime_like.weights.buckets import describe, describe_hashed, place_tensors
from slime_like.weights.delta.encoding import HeldTensor, as_integers, changes_nbytes, encode_changes, find_changes
from slime_like.weights.transport import Sender
from slime_like.weights.wire import metadata_from_wire, metadata_to_wire


@dataclass(frozen=True, slots=True)
class _Outgoing:
    """One tensor and how it travels: as a whole without a base, or where too much of it has changed.

    Attributes:
        base: the receivers' copy.
        places: (k,) where it differs from its base; ``None`` without one.
        changes: (n,) uint8, what is sent instead of the tensor; ``None`` if that would be no less.
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
        """That of the whole tensor; hashed only if neither what was ``sent`` nor the base has the same bytes."""
        if self.changes is None:
            return sent, 0.0
        if self.base is not None and self.num_changes == 0:
            return describe(self.name, self.tensor, self.offset, self.base.checksum), 0.0
        return describe_hashed(self.name, self.tensor, self.offset)


class DeltaSender:
    """Sends through ``inner``. Keeps a copy, in host memory, of every tensor it has sent.

    ``metadata.entries`` describe the whole tensors, checksums included; what travels is in ``metadata.location``.
    Every change names the checksum of the tensor it is made for, so that a receiver that holds another one notices.
    After a failed sync the receivers' copies are unknown: open a new sender, which has sent nothing yet.
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
            "inner": metadata_to_wire(inner),
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
        smaller = changes_nbytes(len(places), new.numel(), new.element_size()) < tensor.nbytes
        changes = encode_changes(new, places) if smaller else None
        return _Outgoing(name, tensor, offset, base, places, changes)

    def _remember(self, out: _Outgoing, entry: TensorEntry) -> None:
        if out.base is None or out.places is None:
            self._bases[out.name] = HeldTensor(out.tensor.clone(), entry.checksum)
            return
        as_integers(out.base.tensor)[out.places] = as_integers(out.tensor)[out.places]
        out.base.checksum = entry.checksum
