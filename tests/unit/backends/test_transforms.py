"""Places of Hugging Face's rows in Megatron's shards. Every element is used exactly once.

The expected order of every fused tensor is written out row by row. To count coverage, every piece adds one to the
elements that it touches on either side, over all tensor-parallel ranks.
"""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from backends.megatron.families import family_of
from backends.megatron.families.transforms import (
    ByHead,
    GateUp,
    GroupedQkv,
    Shape,
    Sources,
    Split,
    TensorRank,
    Transform,
    Vocabulary,
)
from slime_like.errors import CheckpointError
from slime_like.models.dimensions import Attention, ModelDimensions
from slime_like.models.linear_attention import LinearAttention
from tests.support.rejections import Rejects
from tests.unit.backends.models import PUBLISHED, dimensions

SMALL = dimensions()


def _shard(
    transform: Transform, sources: Sequence[Tensor], tp: TensorRank, rows: int = 0, of: ModelDimensions = SMALL
) -> Tensor:
    """Fill one rank's Megatron tensor piece by piece. ``rows``: padded number of rows of a vocabulary shard."""
    parts = Sources([tuple(source.shape) for source in sources], tp, of)
    shape = transform.shard_shape(parts, (rows,))
    target = torch.full(shape, -1.0)
    for piece in transform.pieces(parts, shape):
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
    shards = [_shard(GroupedQkv(), sources, TensorRank(rank, size)) for rank in range(size)]
    assert all(len(shard) == 48 // size for shard in shards)
    fused = torch.cat(shards)
    assert (fused if not width else fused[:, 0]).tolist() == order
    if width:  # rows stay whole
        assert torch.equal(fused - fused[:, :1], sources[0][:1].expand(48, -1) - sources[0][0, 0])


def _heads_of(*sources: Tensor, sections: tuple[tuple[int, str], ...], size: int) -> list[float]:
    """Return the first elements of the rows of all ranks' shards, for two key heads with one key row each."""
    linear = LinearAttention((0,), num_key_heads=2, num_value_heads=4, key_dim=1, value_dim=2, conv_width=3)
    hybrid = dimensions(attention=Attention(linear=linear))
    ranks = [TensorRank(rank, size) for rank in range(size)]
    return torch.cat([_shard(ByHead(*sections), sources, rank, of=hybrid) for rank in ranks])[:, 0].tolist()


@pytest.mark.parametrize("size", [1, 2])
def test_a_gated_delta_net_has_the_rows_of_each_key_head_together(size: int) -> None:
    """From queries, keys and values one after the other, and from checkpoints that order them by head already."""
    mixed, gates, steps, decays = (_numbered(100 * n, rows, 3) for n, rows in enumerate((12, 8, 4, 4)))
    sections = ((0, "linear_key"), (0, "linear_key"), (0, "linear_value"))
    sections += ((1, "linear_value"), (2, "linear_heads"), (3, "linear_heads"))
    first = [0, 2, *range(4, 8), *range(100, 104), 200, 201, 300, 301]
    second = [1, 3, *range(8, 12), *range(104, 108), 202, 203, 302, 303]
    assert _heads_of(mixed, gates, steps, decays, sections=sections, size=size) == first + second
    fused, others = _numbered(0, 20, 3), _numbered(100, 8, 3)
    by_head = [*range(10), *range(100, 104), *range(10, 20), *range(104, 108)]
    assert _heads_of(fused, others, sections=((0, "linear_qkvz"), (1, "linear_ba")), size=size) == by_head


@pytest.mark.parametrize("size", [1, 2, 4])
def test_gate_and_up_are_concatenated_per_shard(size: int) -> None:
    sources = [_numbered(0, 8, 6), _numbered(100, 8, 6)]
    for rank in range(size):
        rows = range(rank * 8 // size, (rank + 1) * 8 // size)
        expected = [*rows, *(100 + row for row in rows)]
        assert _shard(GateUp(), sources, TensorRank(rank, size))[:, 0].tolist() == expected


def test_vocabulary_is_padded_at_its_end() -> None:
    """11 rows are in four shards of 4: the third is partly padding, the last one entirely."""
    source = _numbered(0, 11, 6)
    shards = [_shard(Vocabulary(), [source], TensorRank(rank, 4), rows=4) for rank in range(4)]
    rows = [shard[:, 0].tolist() for shard in shards]
    assert rows == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, -1], [-1, -1, -1, -1]]


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
