"""Places of Hugging Face's rows in Megatron's shards. Every element is used exactly once.

The expected order of queries, keys and values is written out row by row; parity covers other fused tensors. To count
coverage, every piece adds one to the elements that it touches on either side, over all tensor-parallel ranks.
"""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from backends.megatron.families import family_of
from backends.megatron.families.transforms import (
    GroupedQkv,
    Shape,
    Sources,
    Split,
    TensorRank,
    Transform,
)
from slime_like.errors import CheckpointError
from tests.support.rejections import Rejects
from tests.unit.backends.models import PUBLISHED, dimensions


def _qkv(sources: Sequence[Tensor], tp: TensorRank) -> Tensor:
    """Fill one rank's Megatron tensor piece by piece."""
    parts = Sources([tuple(source.shape) for source in sources], tp, dimensions())
    shape = GroupedQkv().shard_shape(parts, (0,))
    target = torch.full(shape, -1.0)
    for piece in GroupedQkv().pieces(parts, shape):
        view = piece.view(target)
        view.copy_(sources[piece.source].narrow(piece.axis, piece.start, piece.length).reshape(view.shape))
    return target


def _numbered(first: float, *shape: int) -> Tensor:
    """Make a tensor whose row r starts with ``first + r``, followed by distinct fractions."""
    rows = first + torch.arange(shape[0], dtype=torch.float32)
    return rows if len(shape) == 1 else rows[:, None] + torch.arange(shape[1]) / 64


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("width", [(), (6,)])
def test_qkv_is_interleaved_by_query_group(size: int, width: tuple[int, ...]) -> None:
    """Group g has query heads 2g and 2g+1, key head g and value head g. With eight ranks, two share a group."""
    sources = [_numbered(first, heads * 3, *width) for first, heads in ((0, 8), (100, 4), (200, 4))]
    order = []
    for group in range(4):
        for head in (2 * group, 2 * group + 1):
            order += [head * 3 + d for d in range(3)]
        order += [100 + group * 3 + d for d in range(3)]
        order += [200 + group * 3 + d for d in range(3)]
    shards = [_qkv(sources, TensorRank(rank, size)) for rank in range(size)]
    assert all(len(shard) == 48 // size for shard in shards)
    fused = torch.cat(shards)
    assert (fused if not width else fused[:, 0]).tolist() == order
    if width:  # rows stay whole
        assert torch.equal(fused - fused[:, :1], sources[0][:1].expand(48, -1) - sources[0][0, 0])


# ------------------------------------------------------------------------------------------------------------- coverage
def _thin(shape: Shape, transform: Transform) -> Shape:
    """Shrink the axis that this kind of transform doesn't split, since its length doesn't matter."""
    if len(shape) == 1:
        return shape
    return (1, shape[1]) if isinstance(transform, Split) and transform.axis == 1 else (shape[0], 1)


@pytest.mark.parametrize(
    ("name", "size"), [(name, n) for name, model in PUBLISHED.items() for n in (1, 2, 4, 8) if model.num_heads % n == 0]
)
def test_every_element_of_a_published_model_has_one_place(name: str, size: int) -> None:
    model = PUBLISHED[name]
    padded = -(-model.vocab_size // (128 * size)) * 128
    for rule in family_of(model).rules_for(model):
        shapes = [_thin(shape, rule.transform) for shape in rule.shapes(model)]
        counted = [torch.zeros(shape) for shape in shapes]
        for rank in range(size):
            sources = Sources(shapes, TensorRank(rank, size), model)
            shape = rule.transform.shard_shape(sources, (padded,))
            shard = torch.zeros(shape)
            for piece in rule.transform.pieces(sources, shape):
                piece.view(shard).add_(1)
                counted[piece.source].narrow(piece.axis, piece.start, piece.length).add_(1)
                assert piece.numel(shapes) == piece.view(shard).numel()
            assert shard.max() <= 1 and (rule.transform.pads or shard.min() == 1), rule.megatron
        expected = 1 if rule.transform.sharded else size
        assert all(bool((count == expected).all()) for count in counted), rule.megatron


def test_a_family_without_adapter_is_rejected(rejects: Rejects) -> None:
    with rejects(CheckpointError, "no-weight-adapter"):
        family_of(dimensions(family="gpt2"))
