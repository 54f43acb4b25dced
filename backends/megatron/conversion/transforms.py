"""Layout of Hugging Face tensors inside Megatron's tensor-parallel shards.

A transform names, for one tensor-parallel rank, the *pieces*: which range of which Hugging Face tensor stands in which
view of the rank's Megatron tensor. Reading copies every piece in, writing copies the same pieces out, so both
directions come from one declaration and cannot disagree.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from backends.common.hugging_face.files import Shape as Shape
from slime_like.models.dimensions import ModelDimensions

View = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class TensorRank:
    """One rank of a tensor-parallel group of ``size``."""

    rank: int
    size: int


@dataclass(frozen=True, slots=True)
class Piece:
    """``length`` entries from ``start`` along ``axis`` of source tensor ``source`` stand in ``view(shard)``.

    The view has the elements of that range in row-major order; its shape may group the range's rows.
    """

    source: int
    axis: int
    start: int
    length: int
    view: View

    def numel(self, shapes: Sequence[Shape]) -> int:
        shape = shapes[self.source]
        return math.prod(shape) // shape[self.axis] * self.length


class Transform(Protocol):
    """See the module's text.

    Attributes:
        pads: the shard may have elements without a counterpart; they are zero.
        sharded: tensor-parallel ranks hold different parts.
    """

    pads: ClassVar[bool]
    sharded: ClassVar[bool]

    def shard_shape(self, shapes: Sequence[Shape], tp: TensorRank, actual: Shape) -> Shape:
        """Shape that the Megatron shard must have. ``actual`` is what it has; only padding may depend on it."""

    def pieces(
        self, shapes: Sequence[Shape], tp: TensorRank, shard: Shape, dimensions: ModelDimensions
    ) -> tuple[Piece, ...]:
        """Pieces of this rank's shard, whose shape is ``shard``."""


def _whole(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True, slots=True)
class Replicated:
    """Every tensor-parallel rank has the whole tensor."""

    pads: ClassVar[bool] = False
    sharded: ClassVar[bool] = False

    def shard_shape(self, shapes: Sequence[Shape], tp: TensorRank, actual: Shape) -> Shape:
        return shapes[0]

    def pieces(
        self, shapes: Sequence[Shape], tp: TensorRank, shard: Shape, dimensions: ModelDimensions
    ) -> tuple[Piece, ...]:
        return (Piece(0, 0, 0, shapes[0][0], _whole),)


@dataclass(frozen=True, slots=True)
class Split:
    """Equal consecutive parts along ``axis``: 0 for column-parallel layers, 1 for row-parallel ones."""

    axis: int
    pads: ClassVar[bool] = False
    sharded: ClassVar[bool] = True

    def shard_shape(self, shapes: Sequence[Shape], tp: TensorRank, actual: Shape) -> Shape:
        return _divided(shapes[0], self.axis, tp.size)

    def pieces(
        self, shapes: Sequence[Shape], tp: TensorRank, shard: Shape, dimensions: ModelDimensions
    ) -> tuple[Piece, ...]:
        length = shapes[0][self.axis] // tp.size
        return (Piece(0, self.axis, tp.rank * length, length, _whole),)


@dataclass(frozen=True, slots=True)
class GateUp:
    """Gate and up projections concatenated *per shard*: ``[g0, u0], [g1, u1], ...``."""

    pads: ClassVar[bool] = False
    sharded: ClassVar[bool] = True

    def shard_shape(self, shapes: Sequence[Shape], tp: TensorRank, actual: Shape) -> Shape:
        rows, *rest = shapes[0]
        return (2 * (rows // tp.size), *rest)

    def pieces(
        self, shapes: Sequence[Shape], tp: TensorRank, shard: Shape, dimensions: ModelDimensions
    ) -> tuple[Piece, ...]:
        length = shapes[0][0] // tp.size
        return tuple(Piece(half, 0, tp.rank * length, length, _rows(half * length, length)) for half in (0, 1))


@dataclass(frozen=True, slots=True)
class GroupedQkv:
    """Query, key and value interleaved by query group: each group holds its query heads, one key, one value head.

    Ranks hold equal parts: whole groups, or, where there are more ranks than groups, so many rows of one. Weights and
    biases alike: heads are counted in rows.
    """

    pads: ClassVar[bool] = False
    sharded: ClassVar[bool] = True

    def shard_shape(self, shapes: Sequence[Shape], tp: TensorRank, actual: Shape) -> Shape:
        return (sum(shape[0] for shape in shapes) // tp.size, *shapes[0][1:])

    def pieces(
        self, shapes: Sequence[Shape], tp: TensorRank, shard: Shape, dimensions: ModelDimensions
    ) -> tuple[Piece, ...]:
        if dimensions.num_kv_heads % tp.size:
            return tuple(_rows_of_one_group(shapes, tp, dimensions))
        groups = dimensions.num_kv_heads // tp.size
        queries = dimensions.num_heads // dimensions.num_kv_heads
        heads = ((0, queries), (queries, 1), (queries + 1, 1))
        pieces = []
        for source, (first, count) in enumerate(heads):
            length = shapes[source][0] // tp.size
            view = _group_heads(groups, dimensions.head_dim, first, count)
            pieces.append(Piece(source, 0, tp.rank * length, length, view))
        return tuple(pieces)


def _rows_of_one_group(shapes: Sequence[Shape], tp: TensorRank, dimensions: ModelDimensions) -> Iterator[Piece]:
    """Of several ranks that share a query group: the consecutive rows of query, key and value in one rank's part."""
    sharing = tp.size // dimensions.num_kv_heads
    group, part = divmod(tp.rank, sharing)
    per_group = [shape[0] // dimensions.num_kv_heads for shape in shapes]
    length = sum(per_group) // sharing
    begin, end = part * length, (part + 1) * length
    first = 0  # of the source's rows, within the group
    for source, rows in enumerate(per_group):
        start, stop = max(begin, first), min(end, first + rows)
        if start < stop:
            view = _rows(start - begin, stop - start)
            yield Piece(source, 0, group * rows + start - first, stop - start, view)
        first += rows


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Rows of an embedding or head; Megatron pads their number so that all ranks have equally many."""

    pads: ClassVar[bool] = True
    sharded: ClassVar[bool] = True

    def shard_shape(self, shapes: Sequence[Shape], tp: TensorRank, actual: Shape) -> Shape:
        rows, width = shapes[0]
        return (max(actual[0], -(-rows // tp.size)), width)

    def pieces(
        self, shapes: Sequence[Shape], tp: TensorRank, shard: Shape, dimensions: ModelDimensions
    ) -> tuple[Piece, ...]:
        start = min(tp.rank * shard[0], shapes[0][0])
        length = min(shard[0], shapes[0][0] - start)
        return (Piece(0, 0, start, length, _rows(0, length)),) if length else ()


def _divided(shape: Shape, axis: int, size: int) -> Shape:
    return (*shape[:axis], shape[axis] // size, *shape[axis + 1 :])


def _rows(start: int, length: int) -> View:
    return lambda tensor: tensor.narrow(0, start, length)


def _group_heads(groups: int, head_dim: int, first: int, count: int) -> View:
    """(rows, ...) of a fused tensor to (groups, count, head_dim, ...): heads ``first`` to ``first + count``."""
    return lambda tensor: tensor.view(groups, -1, head_dim, *tensor.shape[1:]).narrow(1, first, count)
