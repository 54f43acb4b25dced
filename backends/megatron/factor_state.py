"""Low-rank factors in a checkpoint: cut like their weights, so that any layout reads them."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor, nn

from backends.common.trainer.roles import ADDED

_FACTOR = re.compile(rf"(?P<layer>.+)\.{ADDED}\.?(?P<expert>\d*)\.(?P<letter>[ab])")
"""Name of a factor. ``GroupedLinear`` numbers its experts' factors."""


def factor_entries(chunk: nn.Module, state: Mapping[str, Any]) -> dict[str, ShardedTensor | ShardedTensorFactory]:
    """Describe the factors in a model chunk by name; nothing if it has none.

    Every layer and expert has its own tensors on disk, because targets may differ.

    Args:
        state: sharded state of the whole chunk, which describes the weights.
    """
    entries: dict[str, ShardedTensor | ShardedTensorFactory] = {}
    for name, factor in chunk.named_parameters():
        if (match := _FACTOR.fullmatch(name)) is None:
            continue
        weight = state[f"{match['layer']}.weight{match['expert']}"]
        is_factory = isinstance(weight, ShardedTensorFactory)
        parts = list(nested_values(weight.build())) if is_factory else [weight]
        if match["letter"] == "a":
            entries[name] = _like(parts[0], factor, "a", 1)
        else:
            entries[name] = _of_parts(parts, factor) if is_factory else _like(weight, factor, "b", 0)
    return entries


def _of_parts(parts: list[ShardedTensor], b: Tensor) -> ShardedTensorFactory:
    """Describe a B whose weight is several parts of the tensor on disk, such as gate and up projection."""

    def build(key: str, values: Tensor, *unused: Any) -> list[ShardedTensor]:
        rows = zip(parts, values.chunk(len(parts)), strict=True)
        return [replace(_like(part, one, "b", 0), key=key) for part, one in rows]

    first = _like(parts[0], b.chunk(len(parts))[0], "b", 0)
    return ShardedTensorFactory(first.key, b, build, torch.cat, first.replica_id)


def _like(weight: ShardedTensor, factor: Tensor, letter: str, axis: int) -> ShardedTensor:
    """Describe a factor that is cut along ``axis`` like its weight, and whole along the other axis."""
    leading, other = weight.prepend_axis_num, 1 - axis
    numbers = "".join(f".{number}" for number in weight.global_offset[:leading])
    shape, offset, cuts = (
        list(values[leading:]) for values in (weight.global_shape, weight.global_offset, weight.axis_fragmentations)
    )
    # Ranks with other parts of the weight along the other axis hold copies of the factor.
    copy = weight.replica_id[1] + offset[other] // weight.local_shape[other]
    shape[other], offset[other], cuts[other] = factor.shape[other], 0, 1
    return replace(
        weight,
        key=f"{weight.key.removesuffix('weight')}{ADDED}.{letter}{numbers}",
        data=factor,
        dtype=factor.dtype,
        local_shape=tuple(factor.shape),
        global_shape=tuple(shape),
        global_offset=tuple(offset),
        axis_fragmentations=tuple(cuts),
        replica_id=(weight.replica_id[0], copy, weight.replica_id[2]),
        prepend_axis_num=0,
    )
