"""A model's parameters and routers' biases as tensors of its Hugging Face checkpoint.

Most are one tensor with the same name. transformers keeps a layer's experts in two stacks, (E, 2I, H), with the gate's
rows above the up projection's, and (E, H, I). Most checkpoints store each expert's matrices separately, some under
Mixtral's names, others the stack. Reading and writing use the same pieces, so they cannot disagree.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from backends.common.hugging_face.files import Shape
from backends.common.process.agreement import list_names
from slime_like.errors import ConfigError

_STACK = re.compile(r"(?P<experts>.*\.(?P<block>mlp|block_sparse_moe)\.experts)\.(?P<kind>gate_up_proj|down_proj)")
_WHOLE = ".whole"
"""End of our name of a stack that checkpoints store as one tensor."""

_MATRICES = {
    "mlp": {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)},
    "block_sparse_moe": {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)},
}
"""Names of an expert's matrices in checkpoints, by the name of its layer's block there."""


@dataclass(frozen=True, slots=True)
class TensorRows:
    """Rows of one stored tensor from ``start`` on, as a view of the model's memory."""

    name: str
    start: int
    view: Tensor


def stored_shapes(name: str, shape: Shape) -> dict[str, Shape]:
    """Return names and shapes of the stored tensors that make up the parameter ``name``."""
    return {piece.name: tuple(piece.view.shape) for piece in pieces(name, torch.empty(shape, device="meta"))}


def pieces(name: str, values: Tensor, start: int = 0) -> list[TensorRows]:
    """List the stored tensors in ``values``, the parameter's entries from ``start`` along its first axis."""
    stack = _STACK.fullmatch(name)
    if stack is None:
        return [TensorRows(name.removesuffix(_WHOLE), start, values)]
    matrices = _MATRICES[stack["block"]][stack["kind"]]
    return [
        TensorRows(f"{stack['experts']}.{start + index}.{matrix}.weight", 0, part)
        for index, expert in enumerate(values)
        for matrix, part in zip(matrices, expert.chunk(len(matrices)), strict=True)
    ]


def checkpoint_names(hugging_face: Any, kept: Mapping[str, Tensor], path: Path) -> dict[str, str]:
    """Return the tensors' names in checkpoints, by module name. A stack of experts keeps its module name, with its
    block's name in checkpoints, and a mark if it is one tensor.

    transformers defines every family's checkpoint layout.

    Args:
        kept: checkpoint tensors that are not parameters, by module name.

    Raises:
        ConfigError: transformers would store other names or shapes than ``stored_shapes``.
    """
    values = {**dict(hugging_face.named_parameters()), **kept}
    theirs = _stored(hugging_face, values)
    names = {name: _renamed(hugging_face, name, value, theirs) for name, value in values.items()}
    ours: dict[str, Shape] = {}
    for name, value in values.items():
        ours |= stored_shapes(names[name], tuple(value.shape))
    different = sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))
    if different:
        raise ConfigError(
            f"model.path={path}: checkpoints of {type(hugging_face).__name__} are arranged differently from its "
            f"modules ({list_names(different)}), which trainer.backend=fsdp does not support; use another model"
        )
    return names


def _renamed(hugging_face: Any, name: str, value: Tensor, stored: dict[str, Shape]) -> str:
    """Return the other name under which a parameter is stored as one tensor, or ``name`` if there is none."""
    if _STACK.fullmatch(name):
        other = name.replace(".mlp.experts.", ".block_sparse_moe.experts.")
        is_renamed = other.replace("gate_up_proj", "0.w1.weight").replace("down_proj", "0.w2.weight") in stored
        return other if is_renamed else name + _WHOLE * (name in stored)
    if name in stored:
        return name
    alone = _stored(hugging_face, {name: value})
    return next(iter(alone)) if list(alone.values()) == [tuple(value.shape)] else name


def _stored(hugging_face: Any, values: dict[str, Tensor]) -> dict[str, Shape]:
    return {name: tuple(value.shape) for name, value in revert_weight_conversion(hugging_face, values).items()}
