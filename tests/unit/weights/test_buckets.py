"""Tensors packed into a flat buffer and read back, and metadata over the wire."""

import json

import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_like.interfaces import BucketMetadata, TensorEntry, WeightBucket
from slime_like.weights.checksums import tensor_checksum
from slime_like.weights.transport import ALIGNMENT, bucket_nbytes, read_bucket, write_bucket
from tests.support.properties import examples

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float64]


@examples(40)
@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 7), max_size=3)), min_size=1, max_size=6))
def test_round_trip(kinds: list[tuple[torch.dtype, list[int]]]) -> None:
    """Tensors of any strides are stored in row-major order and read back as views."""
    strided = [(torch.randn(shape) * 9).to(dtype).permute([*range(len(shape))][::-1]) for dtype, shape in kinds]
    tensors = [(f"t{i}", tensor) for i, tensor in enumerate(strided)]
    buffer = torch.full((bucket_nbytes(WeightBucket(tensors)),), 255, dtype=torch.uint8)
    entries, _ = write_bucket(WeightBucket(tensors), buffer)
    for (name, tensor), (seen_name, seen), entry in zip(tensors, read_bucket(entries, buffer), entries, strict=True):
        assert (seen_name, seen.dtype, seen.shape) == (name, tensor.dtype, tensor.shape)
        assert torch.equal(seen, tensor)
        assert seen.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
        assert entry.offset % ALIGNMENT == 0
        assert entry.checksum == tensor_checksum(tensor) == tensor_checksum(seen)


def test_metadata_over_the_wire() -> None:
    entry = TensorEntry("t", "float32", (2, 3), 0, 24, 2**64 - 1)
    metadata = BucketMetadata("shared_memory", {"segment": "x.1", "nbytes": 64}, (entry,))
    assert BucketMetadata.from_wire(json.loads(json.dumps(metadata.to_wire()))) == metadata
