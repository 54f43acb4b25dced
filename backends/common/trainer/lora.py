"""Low-rank factors (LoRA, https://arxiv.org/abs/2106.09685), the same for every backend.

A module can hold several Hugging Face matrices, such as query, key and value. Each has its own factors. The module's A,
(n r, in), has those of its n targeted matrices one after the other. Its B, (out, r), has the rows of the module's
weight, in the same order. ``owner``, (out, n), has a 1 where a row of the weight belongs to a matrix.
"""

import math
from collections.abc import Mapping
from zlib import crc32

import torch
from torch import Tensor


def initial_a(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return Kaiming's uniform values for A, (r, in), in float32 on the CPU: the same in every layout.

    Args:
        name: PEFT's name of the tensor.
    """
    generator = torch.Generator().manual_seed(crc32(name.encode()))
    bound = 1 / math.sqrt(shape[1])
    return (2 * torch.rand(shape, generator=generator) - 1) * bound


class Initial:
    """The factors at the start, readable like a checkpoint: A is ``initial_a``, B is 0.

    Attributes:
        shapes: by PEFT's name, whole factors.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = shapes

    def read(self, name: str, axis: int, start: int, length: int) -> Tensor:
        """Return ``length`` entries from ``start`` along ``axis``."""
        values = self.b if ".lora_B." in name else initial_a
        return values(name, self.shapes[name]).narrow(axis, start, length)

    def b(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the values of B."""
        return torch.zeros(shape)


class Trial(Initial):
    """Factors that change what the model computes, the same in every layout: B is uniform within ``size`` divided by
    the root of the rank."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], size: float = 0.1) -> None:
        super().__init__(shapes)
        self._size = size

    def b(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._size * initial_a(name, shape)


def block_diagonal(b: Tensor, owner: Tensor) -> Tensor:
    """Return (out, n r) from B: each row at the columns of its matrix's part of A, and zeros elsewhere."""
    return (owner[:, :, None] * b[:, None, :]).flatten(1)


def merge_lora(weight: Tensor, a: Tensor, b: Tensor, owner: Tensor, scale: float) -> Tensor:
    """Return the weight, (out, in), plus its factors' scaled product, computed in float32 and rounded once."""
    product = block_diagonal(b.float(), owner.float()) @ a.float()
    return torch.add(weight.float(), product, alpha=scale).to(weight.dtype)
