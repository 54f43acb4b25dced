"""Weights on their way from a trainer to the engines: tensors, buckets, receipts."""

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor inside a bucket.

    Attributes:
        name: Hugging Face parameter name.
        dtype: torch dtype name without the prefix, e.g. "bfloat16".
        shape: full (unsharded) shape.
        offset, nbytes: where its bytes lie in the bucket.
        checksum: ``slime_like.weights.checksums.tensor_checksum`` of the bytes as sent.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class BucketFigures:
    """The cost of one bucket for its sender; not sent to receivers.

    Attributes:
        wire_nbytes: bytes that travel to every receiver; fewer than the tensors' where only changes do.
        changed, elements: of the elements that were compared with the last sync, those that differ; 0 where none were.
        hash_s: seconds spent hashing.
    """

    wire_nbytes: int = 0
    changed: int = 0
    elements: int = 0
    hash_s: float = 0.0


@dataclass(frozen=True, slots=True)
class BucketMetadata:
    """What an engine needs to fetch one bucket: small, picklable, sent by RPC while the bytes go by the transport.

    Attributes:
        transport: name of the transport that carries the bytes.
        location: the transport's own handle (a shared-memory name, a tag, ...).
        entries: the tensors inside, in order.
        figures: what it cost; not sent to engines.
    """

    transport: str
    location: dict[str, Any]
    entries: tuple[TensorEntry, ...]
    figures: BucketFigures = field(default_factory=BucketFigures, compare=False)

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)


@dataclass(slots=True)
class WeightBucket:
    """Full, Hugging-Face-named tensors on their way out of a trainer rank; valid until the next one is asked for."""

    tensors: list[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class UpdateReceipt:
    """An engine's word on one finished update.

    Attributes:
        version: what it serves now.
        checksums: the hash of every tensor's bytes as its worker received them.
        hash_s: seconds that the worker spent hashing; 0 where the engine does not measure it.
    """

    version: int
    checksums: dict[str, int]
    hash_s: float = 0.0
