"""Weights sent from a trainer to the engines: manifests, tensors, buckets, receipts."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from slime_like.interfaces.conversion import TensorInfo

MODEL = "model"


@dataclass(frozen=True, slots=True)
class Manifest:
    """The tensors that an update brings.

    Attributes:
        tensors: type and full shape by Hugging Face name.
        updates: ``MODEL`` for all weights of the model, or the name of what a partial update brings, such as an
            adapter or a draft head. An engine rejects a name that it cannot update.
    """

    tensors: Mapping[str, TensorInfo]
    updates: str = MODEL

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], updates: str = MODEL) -> Self:
        return cls(
            {name: TensorInfo(dtype_name(each.dtype), tuple(each.shape)) for name, each in tensors.items()}, updates
        )

    @classmethod
    def joined(cls, parts: Iterable[Self | None]) -> Self:
        """Join the parts of all trainer ranks, at least one of which exports."""
        found = [part for part in parts if part is not None]
        return cls({name: info for part in found for name, info in part.tensors.items()}, found[0].updates)


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of the type without the prefix, e.g. "bfloat16"."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor inside a bucket.

    Attributes:
        name: Hugging Face parameter name.
        dtype: torch dtype name without the prefix, e.g. "bfloat16".
        shape: full (unsharded) shape.
        offset, nbytes: position of its bytes in the bucket.
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
    """Information an engine needs to fetch one bucket. It is small and sent by RPC; the transport carries the bytes.

    Attributes:
        transport: name of the transport that carries the bytes.
        location: the transport's handle (a shared-memory name, a tag, ...).
        entries: the tensors inside, in order.
        hash_s: seconds that the sender spent hashing.
        saved_nbytes: bytes of tensors that need not be sent, because only changes are.
        compared, changed: elements compared with the last sync, and how many of them differ.

    The fields after ``entries`` are the sender's report and are not sent to engines.
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

    def to_wire(self) -> dict[str, Any]:
        """Return plain values, for RPC layers that carry nothing else (by design: no pickle)."""
        entries = [asdict(entry) for entry in self.entries]
        return {"transport": self.transport, "location": self.location, "entries": entries}

    @classmethod
    def from_wire(cls, wire: dict[str, Any]) -> Self:
        """Invert ``to_wire``. Lists that JSON or msgpack made from tuples become tuples again."""
        entries = tuple(TensorEntry(**{**entry, "shape": tuple(entry["shape"])}) for entry in wire["entries"])
        return cls(wire["transport"], wire["location"], entries)


@dataclass(slots=True)
class WeightBucket:
    """Full tensors with Hugging Face names, from a trainer rank; valid until the next bucket is requested."""

    tensors: list[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class WeightExport:
    """One rank's part of an export, to be iterated once.

    Attributes:
        manifest: the tensors of all ``buckets``; ``None`` on ranks that send none.
    """

    manifest: Manifest | None
    buckets: Iterator[WeightBucket]

    def __iter__(self) -> Iterator[WeightBucket]:
        return self.buckets


@dataclass(frozen=True, slots=True)
class UpdateReceipt:
    """An engine's report of one finished update.

    Attributes:
        version: the version now served.
        checksums: hash of every tensor's bytes as its worker received them.
        hash_s: seconds that the worker spent hashing; 0 if the engine does not measure it.
    """

    version: int
    checksums: dict[str, int]
    hash_s: float = 0.0
