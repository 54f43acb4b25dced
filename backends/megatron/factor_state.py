"""Low-rank factors in a checkpoint: cut like their weights, so that any layout reads them."""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor, nn

from backends.common.trainer.lora import ADDED

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
        if match := _FACTOR.fullmatch(name):
            weight = state[f"{match['layer']}.weight{match['expert']}"]
            parts = list(nested_values(weight.build())) if isinstance(weight, ShardedTensorFactory) else [weight]
            entries[name] = _like(parts[0], factor, "a") if match["letter"] == "a" else _whole_b(parts, factor)
    return entries


def _whole_b(parts: list[ShardedTensor], b: Tensor) -> ShardedTensor | ShardedTensorFactory:
    """Describe a B whose weight may be several parts of the tensor on disk, such as gate and up projection."""
    first = _like(parts[0], b.chunk(len(parts))[0], "b")
    if len(parts) == 1:
        return replace(first, data=b)

    def build(key: str, values: Tensor, *unused: Any) -> list[ShardedTensor]:
        rows = zip(parts, values.chunk(len(parts)), strict=True)
        return [replace(_like(part, one, "b"), key=key) for part, one in rows]

    return ShardedTensorFactory(first.key, b, build, torch.cat, first.replica_id)


def _like(base: ShardedTensor, factor: Tensor, letter: str) -> ShardedTensor:
    """Describe an A that is cut by columns like its weight and has whole rows, or a B the other way round."""
    leading, whole = base.prepend_axis_num, "ab".index(letter)
    numbers = "".join(f".{number}" for number in base.global_offset[:leading])
    described = base.global_shape, base.global_offset, base.axis_fragmentations
    shape, offset, cuts = (list(each[leading:]) for each in described)
    # Ranks with other parts of the weight along the whole axis hold copies of the factor.
    copy = base.replica_id[1] + offset[whole] // base.local_shape[whole]
    shape[whole], offset[whole], cuts[whole] = factor.shape[whole], 0, 1
    return ShardedTensor(
        f"{base.key.removesuffix('weight')}{ADDED}.{letter}{numbers}",
        factor,
        factor.dtype,
        tuple(factor.shape),
        *(tuple(each) for each in (shape, offset, cuts)),
        (base.replica_id[0], copy, base.replica_id[2]),
    )
