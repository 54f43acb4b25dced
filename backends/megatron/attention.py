"""Packed core attention: what Megatron's attention layer calls between its projections."""

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from backends.common.attention.choice import AnyAttention
from backends.common.step.packs import ResponseRows
from backends.megatron.rotary import apply_rotary


@dataclass
class PackedLayout(PackedSeqParams):
    """Layer inputs of one micro-batch besides hidden states; it travels with the micro-batch.

    Attributes:
        cos, sin: (T_local, 1, rotary_dim / 2) rotary table of the local tokens.
        interleaved: it turns neighbouring elements, not those half a head apart.
        attention: computes within the sequences' boundaries; None for Transformer Engine's.
    """

    cos: Tensor | None = None
    sin: Tensor | None = None
    interleaved: bool = False
    attention: AnyAttention | None = None
    responses: ResponseRows | None = None

    @classmethod
    def given(cls, packed_seq_params: Self | None) -> Self:
        """Check the layout that a layer was called with."""
        if packed_seq_params is None or packed_seq_params.cos is None:
            raise ValueError("attention needs the micro-batch's PackedLayout as packed_seq_params")
        return packed_seq_params

    def rotated(self, *heads: Tensor) -> tuple[Tensor, ...]:
        """Queries or keys, (T_local, heads, rotary_dim) each, turned to their positions."""
        assert self.cos is not None and self.sin is not None
        return tuple(apply_rotary(x, self.cos, self.sin, self.interleaved) for x in heads)


class PackedCoreAttention(torch.nn.Module):
    """Causal attention inside every sequence of a pack, with rotary embedding, on one rank or over the context group.

    A drop-in for Megatron's ``core_attention``. It takes (T, H, D) queries and (T, G, D) keys and values and reads
    boundaries and angles from the micro-batch's ``PackedLayout`` only.

    Attributes:
        rotates: queries and keys come without rotary embedding.
    """

    rotates: ClassVar[bool] = True

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedLayout | None = None,
    ) -> Tensor:
        """Returns (T, H * D), D being that of the values."""
        layout = PackedLayout.given(packed_seq_params)
        if self.rotates:
            query, key = layout.rotated(query, key)
        if layout.attention is None:
            raise ValueError("the micro-batch's PackedLayout has no boundaries of its sequences")
        out = layout.attention.attend(query, key, value, self.scale)
        return out.reshape(out.shape[0], -1)


class RotatedCoreAttention(PackedCoreAttention):
    """The same for queries and keys that have their rotary embedding."""

    rotates = False
