"""Rotary position embedding by explicit positions: one table per micro-batch, shared by all layers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from slime_like.config.dimensions import ModelDimensions
from slime_like.errors import ConfigError


def inverse_frequencies(dimensions: ModelDimensions) -> Tensor:
    """(head_dim / 2,) float32 angles per position (https://arxiv.org/abs/2104.09864, section 3.4.2), scaled if asked.

    Computed in float32 as engines and Hugging Face do: at position 10^5 one unit in the last place is 0.01 rad.

    Raises:
        ConfigError: a scaling that is not computed here.
    """
    exponent = torch.arange(0, dimensions.head_dim, 2, dtype=torch.float32) / dimensions.head_dim
    frequencies = 1.0 / dimensions.rope_theta**exponent
    scaling = dimensions.rope_scaling
    if scaling is None:
        return frequencies
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "linear":
        return frequencies / scaling["factor"]
    if kind == "llama3":
        return _llama3(frequencies, scaling)
    raise ConfigError([f"config.json: rope scaling {kind!r} is not supported; use linear, llama3 or none"])


def _llama3(frequencies: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Long wavelengths are divided by the factor, short ones kept, those between blended (Llama 3.1's own rule)."""
    context = scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelength = 2 * math.pi / frequencies
    blend = ((context / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * frequencies / scaling["factor"] + blend * frequencies


def rotary_table(inv_freq: Tensor, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin, each (T, 1, head_dim / 2) in ``dtype``, of the positions (T,)."""
    angles = torch.outer(position_ids.to(inv_freq.dtype), inv_freq).unsqueeze(1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotated(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0], cos, sin, -1.0), None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, direction: float) -> Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    x1, x2 = x.chunk(2, dim=-1)
    out1, out2 = out.chunk(2, dim=-1)
    torch.mul(x1, cos, out=out1).addcmul_(x2, sin, value=-direction)
    torch.mul(x2, cos, out=out2).addcmul_(x1, sin, value=direction)
    return out


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate (T, heads, head_dim) by the table's angles, pairing dimension i with i + head_dim / 2."""
    return _Rotate.apply(x, cos, sin)
