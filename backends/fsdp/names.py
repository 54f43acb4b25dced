"""A model's parameters as the tensors of its Hugging Face checkpoint.

Most are one tensor under the same name. transformers keeps the experts of a layer in two stacks, (E, 2I, H) with the
gate's rows above those of the up projection, and (E, H, I); checkpoints have every expert's matrices by themselves.
Reading and writing follow the same pieces, so that they cannot disagree.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import Tensor

from backends.common.hf_files import Shape

_STACK = re.compile(r"(?P<experts>.*\.mlp\.experts)\.(?P<kind>gate_up_proj|down_proj)")
_MATRICES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one stored tensor, and where they lie in the model's memory.

    Attributes:
        name: of the stored tensor.
        start: its first row that is meant.
        view: the rows themselves.
    """

    name: str
    start: int
    view: Tensor


def stored_shapes(name: str, shape: Shape) -> dict[str, Shape]:
    """Names and shapes of the stored tensors that make up the parameter ``name``."""
    stack = _STACK.fullmatch(name)
    if stack is None:
        return {name: shape}
    matrices = _MATRICES[stack["kind"]]
    experts, rows, columns = shape
    return {
        f"{stack['experts']}.{expert}.{matrix}.weight": (rows // len(matrices), columns)
        for expert in range(experts)
        for matrix in matrices
    }


def pieces(name: str, values: Tensor, start: int = 0) -> list[Piece]:
    """The stored tensors in ``values``, the parameter's entries from ``start`` along its first axis on."""
    stack = _STACK.fullmatch(name)
    if stack is None:
        return [Piece(name, start, values)]
    matrices = _MATRICES[stack["kind"]]
    return [
        Piece(f"{stack['experts']}.{start + index}.{matrix}.weight", 0, part)
        for index, expert in enumerate(values)
        for matrix, part in zip(matrices, expert.chunk(len(matrices)), strict=True)
    ]
