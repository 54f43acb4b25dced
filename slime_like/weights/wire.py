"""Bucket metadata as plain values, for RPC layers that carry nothing else (by design: no pickle)."""

from dataclasses import asdict
from typing import Any

from slime_like.errors import WeightSyncError
from slime_like.interfaces import BucketMetadata, TensorEntry


def metadata_to_wire(metadata: BucketMetadata) -> dict[str, Any]:
    return {
        "transport": metadata.transport,
        "location": metadata.location,
        "entries": [asdict(entry) for entry in metadata.entries],
    }


def metadata_from_wire(wire: dict[str, Any]) -> BucketMetadata:
    """Invert ``metadata_to_wire``. Lists that JSON or msgpack made from tuples become tuples again."""
    try:
        entries = tuple(TensorEntry(**{**entry, "shape": tuple(entry["shape"])}) for entry in wire["entries"])
        return BucketMetadata(wire["transport"], wire["location"], entries)
    except (KeyError, TypeError) as error:
        raise WeightSyncError(f"not the metadata of a weight bucket: {error}", code="bad-metadata") from error
