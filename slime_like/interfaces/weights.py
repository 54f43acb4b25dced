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
class BucketMetadata:
    """What an engine needs to fetch one bucket: small, picklable, sent by RPC while the bytes go by the transport.

    Attributes:
        transport: name of the transport that carries the bytes.
        location: the transport's own handle (a shared-memory name, a tag, ...).
        entries: the tensors inside, in order.
        hash_s: seconds that the sender spent hashing.
        saved_nbytes: bytes of the tensors that need not travel, because only changes do.
        compared, changed: elements that were compared with the last sync, and those of them that differ.

    What follows the entries is the sender's report, and not sent to engines.
    """

    transport: str
    location: dict[str, Any]
    entries: tuple[TensorEntry, ...]
    hash_s: float = field(default=0.0, compare=False)
    saved_nbytes: int = field(default=0, compare=False)
    compared: int = field(default=0, compare=False)
    changed: int = field(default=0, compare=False)

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries)


@dataclass(slots=True)
class WeightBucket:
    """Full, Hugging-Face-named tensors on their way out of a trainer rank; valid until the next one is asked for."""

    tensors: list[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class UpdateReceipt:
    """An engine's report of one finished update.

    Attributes:
        version: what it serves now.
        checksums: the hash of every tensor's bytes as its worker received them.
        hash_s: seconds that the worker spent hashing; 0 where the engine does not measure it.
    """

    version: int
    checksums: dict[str, int]
    hash_s: float = 0.0
