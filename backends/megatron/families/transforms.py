"""Layout of Hugging Face tensors inside Megatron's tensor-parallel shards.

For one tensor-parallel rank, a transform lists the *pieces*: each maps a range of a Hugging Face tensor to a view of
the rank's Megatron tensor. Reading copies every piece in, and writing copies the same pieces out. So one declaration
defines both directions, which cannot disagree.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

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
    """A copy: ``length`` entries from ``start`` along ``axis`` of source tensor ``source`` are in ``view(shard)``.

    The view has the range's elements in row-major order; its shape may group the range's rows.
    """

    source: int
    axis: int
    start: int
    length: int
    view: View

    def numel(self, shapes: Sequence[Shape]) -> int:
        shape = shapes[self.source]
        return math.prod(shape) // shape[self.axis] * self.length


@dataclass(frozen=True, slots=True)
class Sources:
    """Shapes of one parameter's Hugging Face tensors, and the rank that holds a part of it."""

    shapes: Sequence[Shape]
    tp: TensorRank
    dimensions: ModelDimensions


class Transform(ABC):
    """A layout, as the module's docstring describes it.

    Attributes:
        pads: the shard may have elements without a counterpart; they are zero.
        sharded: tensor-parallel ranks hold different parts.
        axis: the axis that is split between them.
    """

    pads: bool = False
    sharded: bool = True
    axis: int = 0

    def shard_shape(self, sources: Sources, actual: Shape) -> Shape:
        """Return the required shape of the Megatron shard. Only padding may depend on ``actual``, its current shape."""
        length = sum(shape[self.axis] for shape in sources.shapes) // (sources.tp.size if self.sharded else 1)
        shape = sources.shapes[0]
        return (*shape[: self.axis], length, *shape[self.axis + 1 :])

    @abstractmethod
    def pieces(self, sources: Sources, shard: Shape) -> tuple[Piece, ...]:
        """Return the pieces of this rank's shard, which has shape ``shard``."""


def _whole(tensor: Tensor) -> Tensor:
    return tensor


class Replicated(Transform):
    """The whole tensor on every tensor-parallel rank."""

    sharded = False

    def pieces(self, sources: Sources, shard: Shape) -> tuple[Piece, ...]:
        return (Piece(0, 0, 0, sources.shapes[0][0], _whole),)


class Split(Transform):
    """Equal consecutive parts along ``axis``: 0 for column-parallel layers, 1 for row-parallel ones."""

    def __init__(self, axis: int) -> None:
        self.axis = axis

    def pieces(self, sources: Sources, shard: Shape) -> tuple[Piece, ...]:
        length = sources.shapes[0][self.axis] // sources.tp.size
        return (Piece(0, self.axis, sources.tp.rank * length, length, _whole),)


class GateUp(Transform):
    """Gate and up projections concatenated *per shard*: ``[g0, u0], [g1, u1], ...``."""

    def pieces(self, sources: Sources, shard: Shape) -> tuple[Piece, ...]:
        length = sources.shapes[0][0] // sources.tp.size
        start = sources.tp.rank * length
        return tuple(Piece(half, 0, start, length, _rows(half * length, length)) for half in (0, 1))


class GroupedQkv(Transform):
    """Query, key and value interleaved by query group: each group holds its query heads, one key, one value head.
    Gates of outputs are among the queries.

    Ranks hold equal parts: whole groups or, if there are more ranks than groups, an equal number of one group's rows.
    This applies to weights and biases, because heads are counted in rows.
    """

    def pieces(self, sources: Sources, shard: Shape) -> tuple[Piece, ...]:
        dimensions, tp = sources.dimensions, sources.tp
        if dimensions.num_kv_heads % tp.size:
            return tuple(_rows_of_one_group(sources))
        groups = dimensions.num_kv_heads // tp.size
        queries = sources.shapes[0][0] // sources.shapes[1][0]  # and their gates, if there are some
        heads = ((0, queries), (queries, 1), (queries + 1, 1))
        pieces = []
        for source, (first, count) in enumerate(heads):
            length = sources.shapes[source][0] // tp.size
            view = _group_heads(groups, dimensions.head_dim, first, count)
            pieces.append(Piece(source, 0, tp.rank * length, length, view))
        return tuple(pieces)


def _rows_of_one_group(sources: Sources) -> Iterator[Piece]:
    """Yield one rank's consecutive query, key and value rows, if several ranks share a query group."""
    groups = sources.dimensions.num_kv_heads
    sharing = sources.tp.size // groups
    group, part = divmod(sources.tp.rank, sharing)
    per_group = [shape[0] // groups for shape in sources.shapes]
    length = sum(per_group) // sharing
    begin, end = part * length, (part + 1) * length
    first = 0  # first row of the source within the group
    for source, rows in enumerate(per_group):
        start, stop = max(begin, first), min(end, first + rows)
        if start < stop:
            view = _rows(start - begin, stop - start)
            yield Piece(source, 0, group * rows + start - first, stop - start, view)
        first += rows


class ByHead(Transform):
    """Rows by key head of a gated delta net: each head has its part of every section, one after the other.

    A section is a range of rows of a source, with equal parts for all heads.
    """

    def __init__(self, *sections: tuple[int, str]) -> None:
        """Take each section's source and the name of its size. Sections of one source follow one another."""
        self._sections = sections

    def pieces(self, sources: Sources, shard: Shape) -> tuple[Piece, ...]:
        sizes, tp = sources.dimensions.attention.sizes(sources.dimensions), sources.tp
        heads = sizes["linear_key_heads"] // tp.size
        starts, first, pieces = [0] * len(sources.shapes), 0, []
        for source, name in self._sections:
            length, rows = sizes[name] // tp.size, sizes[name] // tp.size // heads
            view = _head_rows(heads, first, rows)
            pieces.append(Piece(source, 0, starts[source] + tp.rank * length, length, view))
            starts[source] += sizes[name]
            first += rows
        return tuple(pieces)


class Vocabulary(Transform):
    """Rows of an embedding or head. Megatron pads their number so that all ranks have the same."""

    pads = True

    def shard_shape(self, sources: Sources, actual: Shape) -> Shape:
        rows, width = sources.shapes[0]
        return (max(actual[0], -(-rows // sources.tp.size)), width)

    def pieces(self, sources: Sources, shard: Shape) -> tuple[Piece, ...]:
        rows = sources.shapes[0][0]
        start = min(sources.tp.rank * shard[0], rows)
        length = min(shard[0], rows - start)
        return (Piece(0, 0, start, length, _rows(0, length)),) if length else ()


class Stacked(Transform):
    """All sources one after the other, whole on every tensor-parallel rank."""

    sharded = False

    def pieces(self, sources: Sources, shard: Shape) -> tuple[Piece, ...]:
        rows = [shape[0] for shape in sources.shapes]
        return tuple(Piece(n, 0, 0, rows[n], _rows(sum(rows[:n]), rows[n])) for n in range(len(rows)))


class Rows(Transform):
    """Rows of the ``chosen`` sources of a fused layout, with zeros in place of the other sources."""

    def __init__(self, fused: Transform, shapes: Sequence[Shape], chosen: Sequence[int]) -> None:
        """Take the fused transform, the shapes of all its sources, and the indices of the ones that exist."""
        self._fused, self._shapes, self._chosen = fused, shapes, chosen
        self.sharded, self.pads = fused.sharded, len(chosen) < len(shapes)

    def shard_shape(self, sources: Sources, actual: Shape) -> Shape:
        return self._fused.shard_shape(replace(sources, shapes=self._shapes), actual)

    def pieces(self, sources: Sources, shard: Shape) -> tuple[Piece, ...]:
        pieces = self._fused.pieces(replace(sources, shapes=self._shapes), shard)
        found = [piece for piece in pieces if piece.source in self._chosen]
        return tuple(replace(piece, source=self._chosen.index(piece.source)) for piece in found)


def _rows(start: int, length: int) -> View:
    return lambda tensor: tensor.narrow(0, start, length)


def _head_rows(heads: int, first: int, count: int) -> View:
    """View (rows, ...) of a fused tensor as (heads, count, ...): rows ``first`` to ``first + count`` of each head."""
    return lambda tensor: tensor.view(heads, -1, *tensor.shape[1:]).narrow(1, first, count)


def _group_heads(groups: int, head_dim: int, first: int, count: int) -> View:
    """View (rows, ...) of a fused tensor as (groups, count, head_dim, ...): heads ``first`` to ``first + count``."""
    return lambda tensor: tensor.view(groups, -1, head_dim, *tensor.shape[1:]).narrow(1, first, count)
