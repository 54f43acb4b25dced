"""Rotary position embedding by explicit positions: one table per micro-batch, shared by all layers."""

import math
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from slime_like.errors import ConfigError
from slime_like.models.dimensions import ModelDimensions


@dataclass(frozen=True, slots=True)
class Rotary:
    """A model's rotary embedding.

    Attributes:
        inv_freq: (rotary_dim / 2,) float32 angles per position.
        magnitude: factor of cosines and sines.
        interleaved: rotate adjacent elements instead of elements half a head apart.
    """

    inv_freq: Tensor
    magnitude: float
    interleaved: bool

    @classmethod
    def of(cls, dimensions: ModelDimensions, device: torch.device | None = None) -> Self:
        """Create a model's rotary embedding, scaled if configured (https://arxiv.org/abs/2104.09864, section 3.4.2).

        Computed in float32, like engines and Hugging Face: at position 10^5, one unit in the last place is 0.01 rad.

        Raises:
            ConfigError: an unsupported scaling.
        """
        exponent = torch.arange(0, dimensions.rotary_dim, 2, dtype=torch.float32) / dimensions.rotary_dim
        periods = dimensions.rope_theta**exponent
        frequencies, magnitude = 1.0 / periods, 1.0
        if (scaling := dimensions.rope_scaling) is not None:
            kind = scaling.get("rope_type", scaling.get("type"))
            if kind == "linear":
                frequencies = frequencies / scaling["factor"]
            elif kind == "llama3":
                frequencies = _llama3(frequencies, scaling)
            elif kind == "yarn":
                frequencies, magnitude = _yarn(periods, dimensions, scaling), _yarn_magnitude(scaling)
            else:
                problem = f"config.json: rope scaling {kind!r} is not supported; use linear, llama3, yarn or none"
                raise ConfigError([problem])
        return cls(frequencies.to(device), magnitude, dimensions.attention.interleaved)


def _yarn_magnitude(scaling: dict[str, Any]) -> float:
    """Return the factor of cosines and sines (https://arxiv.org/abs/2309.00071, section 3.4)."""
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return _mscale(scaling["factor"], scaling["mscale"]) / _mscale(scaling["factor"], scaling["mscale_all_dim"])
    return _mscale(scaling["factor"], 1.0)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _yarn(periods: Tensor, dimensions: ModelDimensions, scaling: dict[str, Any]) -> Tensor:
    """Divide dimensions that rotate rarely within the original context by the factor; keep those that rotate often.

    Section 3.2 of the paper, with the ramp over dimensions, between whole ones, like in all published models.
    """
    context = scaling["original_max_position_embeddings"]

    def dimension_that_turns(times: float) -> float:
        spread = math.log(context / (2 * math.pi * times)) / math.log(dimensions.rope_theta)
        return dimensions.rotary_dim * spread / 2

    low = dimension_that_turns(scaling.get("beta_fast") or 32.0)
    high = dimension_that_turns(scaling.get("beta_slow") or 1.0)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dimensions.rotary_dim - 1)
    steps = torch.arange(len(periods), dtype=torch.float32) - low
    kept = 1 - (steps / (high - low if high > low else 1e-3)).clamp(0.0, 1.0)
    # Same rounding order as engines and Hugging Face.
    return 1.0 / (scaling["factor"] * periods) * (1 - kept) + 1.0 / periods * kept


def _llama3(frequencies: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Divide long wavelengths by the factor, keep short ones, and blend those between (Llama 3.1's rule)."""
    context = scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelength = 2 * math.pi / frequencies
    blend = ((context / wavelength - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * frequencies / scaling["factor"] + blend * frequencies


def rotary_table(inv_freq: Tensor, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin, each (T, 1, rotary_dim / 2) in ``dtype``, of the positions (T,)."""
    angles = torch.outer(position_ids.to(inv_freq.dtype), inv_freq).unsqueeze(1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotated(x, cos, sin, 1.0, interleaved)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _rotated(grads[0], cos, sin, -1.0, ctx.interleaved), None, None, None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, direction: float, interleaved: bool) -> Tensor:
    out, size = torch.empty_like(x, memory_format=torch.contiguous_format), 2 * cos.shape[-1]
    out[..., size:] = x[..., size:]
    (x1, x2), (out1, out2) = _pairs(x[..., :size], interleaved), _pairs(out[..., :size], interleaved)
    torch.mul(x1, cos, out=out1).addcmul_(x2, sin, value=-direction)
    torch.mul(x2, cos, out=out2).addcmul_(x1, sin, value=direction)
    return out


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, ...]:
    return (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate the leading part of (T, heads, size), of rotary_dim elements, by the table's angles.

    Args:
        interleaved: pair dimension 2i with 2i + 1, else i with i + rotary_dim / 2.
    """
    return _Rotate.apply(x, cos, sin, interleaved)
