"""State of Megatron's distributed optimizer for a checkpoint, in the parameters' shapes and without a copy.

A data-parallel rank holds a flat range of every parameter's elements. Megatron's reshardable format gathers all ranges
in every rank's host memory: 12 bytes per parameter and rank, twice. Here, a few boxes of the parameter describe a
range. Each rank writes its boxes, and reads directly into its state. Keys and global shapes match Megatron's format
``fully_reshardable``, so either can read what the other wrote.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor

_COUNTER = "step"
"""Entry of an optimizer's state without the parameter's shape; saved once for all parameters."""


def sharded_optimizer_state(part: Any, model: Mapping[str, Any]) -> dict[str, ShardedTensor]:
    """Describe this rank's main weights and moments by views of them.

    Args:
        part: Megatron's ``DistributedOptimizer`` with filled state.
        model: sharded state of the model chunks, whose entries hold the parameters.
    """
    tensors = (entry for entry in nested_values(dict(model)) if isinstance(entry, ShardedTensor | ShardedTensorFactory))
    described = {entry.data: entry for entry in tensors}
    return {
        f"{piece.key} {piece.global_offset}": piece
        for buckets in part.gbuf_ranges
        for ranges in buckets.values()
        for bucket in ranges
        for parameter, held in bucket["param_map"].items()
        for name, tensor in part._get_main_param_and_optimizer_states(parameter).items()
        if name != _COUNTER
        for piece in _pieces(f"optimizer.state.{name}", described[parameter], tensor, held["param"].start)
    }


def _pieces(
    prefix: str, parameter: ShardedTensor | ShardedTensorFactory, tensor: Tensor, start: int
) -> Iterator[ShardedTensor]:
    """Describe ``tensor``, the parameter's elements from ``start`` on, box by box."""
    flat = tensor.detach().view(-1)
    for part, first in _parts(parameter):
        count = math.prod(part.local_shape)
        begin, end = max(start, first), min(start + flat.numel(), first + count)
        where = begin - start
        for offsets, sizes in boxes(begin - first, end - first, part.local_shape):
            length = math.prod(sizes)
            leading = (1,) * part.prepend_axis_num
            offset = (*part.global_offset[: len(leading)], *_sum(part.global_offset[len(leading) :], offsets))
            shape = (*leading, *sizes)
            yield ShardedTensor(
                key=f"{prefix}.{part.key}",
                data=flat[where : where + length].view(shape),
                dtype=flat.dtype,
                local_shape=shape,
                global_shape=part.global_shape,
                global_offset=offset,
                axis_fragmentations=None,
                # The last number counts data-parallel replicas, which hold different elements here.
                replica_id=(*part.replica_id[:2], 0),
                allow_shape_mismatch=part.allow_shape_mismatch,
            )
            where += length


def _parts(parameter: ShardedTensor | ShardedTensorFactory) -> Iterator[tuple[ShardedTensor, int]]:
    """Yield a parameter's parts that are tensors on disk, each with the number of elements before it.

    Gate and up projection are one parameter here, but two parts of the tensor on disk.
    """
    if isinstance(parameter, ShardedTensor):
        yield parameter, 0
        return
    first = parameter.data.storage_offset()
    for part in nested_values(parameter.build()):
        assert part.data.is_contiguous(), f"{part.key}: a part of a parameter must be contiguous"
        yield replace(part, data=None), part.data.storage_offset() - first


def _sum(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip(left, right, strict=True))


def boxes(start: int, stop: int, shape: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cover the elements ``start`` to ``stop`` of a row-major tensor by ordered boxes, as (offsets, sizes).

    At most ``2 * len(shape) - 1`` boxes: the end of a row, whole rows, the start of a row, and recursively in each row.
    """
    row = math.prod(shape[1:])
    while start < stop:
        index, within = divmod(start, row)
        rows = 0 if within else (stop - start) // row
        if rows:
            yield (index, *[0] * (len(shape) - 1)), (rows, *shape[1:])
            start += rows * row
            continue
        end = min(stop, (index + 1) * row)
        for offsets, sizes in boxes(within, end - index * row, shape[1:]):
            yield (index, *offsets), (1, *sizes)
        start = end
