"""Megatron's layers in fewer passes over memory: on a CPU, by the kernels of ``slime_like.cpu.kernels``.

A layer's parameters are the same, and where a kernel does not know what it is given (context parallelism, long
sequences, a part of a wider array) it computes as it does without.
"""

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from backends.common.attention.choice import AnyAttention
from backends.common.attention.packed_attention import LocalAttention
from backends.common.attention.prefixes import PrefixAttention, Tree
from backends.megatron.attention import PackedLayout
from backends.megatron.norm import RMSNorm
from backends.megatron.versions.layers import is_dense, set_dense
from slime_like.cpu.kernels.operators import (
    FusedAttention,
    FusedBranch,
    FusedRMSNorm,
    FusedSum,
    FusedSwiGLU,
    are_served,
    is_served_width,
)

LONGEST = 512
"""Tokens of a sequence above which torch's attention, with its blocks of keys, is faster."""


class FusedNorm(RMSNorm):
    """Forward and backward in one pass each, together with what is done to the residual beside it."""

    def forward(
        self, x: Tensor, *, residual: Tensor | None = None, rows: Tensor | None = None, branches: bool = False
    ) -> Any:
        """(..., hidden_size) to the same shape.

        Args:
            residual: ``rows`` of its sum with x, both (T, hidden_size), are returned and normalised.
            branches: x, (T, hidden_size), is returned, too: for what goes past the norm.
        """
        if residual is not None:
            return FusedSum.apply(x, residual, rows, self.weight, self.eps)
        if branches:
            return FusedBranch.apply(x, self.weight, self.eps)
        return FusedRMSNorm.apply(x, self.weight, self.eps) if are_served(x, self.weight) else super().forward(x)


class FusedLayer(TransformerLayer):
    """Norms in one pass with the sums beside them; and in the model's last layer, behind its attention, only the rows
    that the head scores: what follows a prompt's tokens is not needed.

    Attributes:
        scores: if it is that layer. Of sequence-parallel tokens a rank does not have the head's rows: there all stay.
    """

    def __init__(self, config: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        self.scores = self.layer_number == config.num_layers and not config.sequence_parallel

    def forward(self, hidden_states: Tensor, *given: Any, **options: Any) -> Any:
        """(T, 1, H), or as many as are scored in the last layer, and no context."""
        layout = PackedLayout.given(options["packed_seq_params"])
        rows = layout.responses.index if self.scores and layout.responses is not None else None
        if not are_served(hidden_states):
            hidden, context = super().forward(hidden_states, *given, **options)
            return (hidden if rows is None else hidden.index_select(0, rows)), context
        tokens = torch.arange(len(hidden_states)) if rows is None else rows
        # Norms are called as modules: hooks may have to wait for their weights, which other ranks send.
        residual, normed = self.input_layernorm(hidden_states.squeeze(1), branches=True)
        attended, _ = self.self_attention(normed.unsqueeze(1), attention_mask=None, packed_seq_params=layout)
        hidden, normed = self.pre_mlp_layernorm(attended.squeeze(1), residual=residual, rows=tokens)
        out, _ = self.mlp(normed.unsqueeze(1))
        return hidden.unsqueeze(1) + out, None


class FusedMLP(MLP):
    """Gate, activation and up between the projections in one pass."""

    def __init__(self, config: Any, **options: Any) -> None:
        if config.activation_func != F.silu or not config.gated_linear_unit or config.add_bias_linear:
            raise ValueError("the fused MLP is SwiGLU's, without biases; build any other of Megatron's own MLP")
        submodules = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        super().__init__(config, submodules, ffn_hidden_size=config.ffn_hidden_size, **options)

    def forward(self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **options: Any) -> Any:
        """(T, 1, H) to the same, and no bias."""
        if per_token_scale is not None or not are_served(hidden_states):
            return super().forward(hidden_states, per_token_scale, **options)
        gate_up, _ = self.linear_fc1(hidden_states)
        return self.linear_fc2(FusedSwiGLU.apply(gate_up))


class FusedSelfAttention(SelfAttention):
    """From the projection's output to the context in one pass: norms, rotary embedding and packed attention."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *given: Any,
        packed_seq_params: PackedLayout | None = None,
        **options: Any,
    ) -> Any:
        """(T, 1, H) to the same, and the output's bias."""
        layout = PackedLayout.given(packed_seq_params)
        tree = _tree(layout.attention)
        if tree is None or not self._is_fused(hidden_states, layout):
            return super().forward(hidden_states, attention_mask, *given, packed_seq_params=layout, **options)
        assert layout.cos is not None and layout.sin is not None
        mixed, _ = self.get_query_key_value_tensors(hidden_states, split_qkv=False)
        query_norm, key_norm = (n if isinstance(n, RMSNorm) else None for n in (self.q_layernorm, self.k_layernorm))
        context = FusedAttention.apply(
            mixed.squeeze(1),
            None if query_norm is None else query_norm.weight,
            None if key_norm is None else key_norm.weight,
            0.0 if query_norm is None else query_norm.eps,
            layout.cos.squeeze(1),
            layout.sin.squeeze(1),
            *(np.asarray(each, dtype=np.int64) for each in (tree.boundaries, tree.parents)),
            self.core_attention.scale,
        )
        return self.linear_proj(context.unsqueeze(1))

    def _is_fused(self, hidden_states: Tensor, layout: PackedLayout) -> bool:
        if layout.interleaved:
            return False
        # With more ranks than KV heads a rank has a part of a group's queries.
        whole_groups = self.config.num_query_groups >= self.world_size
        return whole_groups and is_served_width(self.hidden_size_per_attention_head) and are_served(hidden_states)


def _tree(attention: AnyAttention | None) -> Tree | None:
    """Segments of a rank that has all that its tokens see, none of them too long; ``None`` of any other."""
    if isinstance(attention, LocalAttention):
        boundaries = attention.segments.host
        tree = Tree(boundaries, (-1,) * (len(boundaries) - 1), attention.segments.longest)
    elif isinstance(attention, PrefixAttention) and attention.group is None:
        tree = attention.tree
    else:
        return None
    return tree if tree.longest <= LONGEST else None


def fuse(spec: ModuleSpec) -> None:
    """Replace what a layer of ``local_layer_spec`` is made of."""
    layer = spec.submodules
    layer.input_layernorm = layer.pre_mlp_layernorm = FusedNorm
    if is_dense(layer):
        set_dense(layer, FusedMLP)
        spec.module = FusedLayer
    attention = layer.self_attention
    if attention.module is SelfAttention:
        attention.module = FusedSelfAttention
        if attention.submodules.q_layernorm is RMSNorm:
            attention.submodules.q_layernorm = attention.submodules.k_layernorm = FusedNorm
