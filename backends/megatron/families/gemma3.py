"""Gemma 3: layers whose attention and MLP end with a norm."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.parallel_state import get_tensor_model_parallel_group
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor

from backends.megatron.families import MegatronFamily
from backends.megatron.families.rules import ATTENTION, OUTER, QK_NORM, Rule, feed_forward, hf, layer_rule
from backends.megatron.families.transforms import Replicated
from backends.megatron.norm import RMSNorm
from backends.megatron.versions import mlp_built_by
from slime_like.models.dimensions import ModelDimensions


class _Norm(RMSNorm):
    """A norm that describes itself, as MLPs require of their modules."""

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Describe the weight, of which every tensor-parallel rank has a copy."""
        own = dict(self.named_parameters())
        groups = {"tp_group": get_tensor_model_parallel_group(), "dp_cp_group": metadata["dp_cp_group"]}
        state: dict[str, Any] = make_sharded_tensors_for_checkpoint(own, prefix, {}, sharded_offsets, **groups)
        return state


class _Normed(torch.nn.Module):
    """Adds a norm of the output to one of Megatron's modules."""

    def __init__(self, config: TransformerConfig, *arguments: Any, **options: Any) -> None:
        super().__init__(config, *arguments, **options)
        self.post_layernorm = _Norm(config, config.hidden_size, config.layernorm_epsilon)

    def forward(self, *arguments: Any, **options: Any) -> tuple[Tensor, None]:
        """Return (T, 1, H)."""
        out, _ = super().forward(*arguments, **options)
        return self.post_layernorm(out), None


class NormedAttention(_Normed, SelfAttention):
    """Megatron's attention with a norm of its output."""


class NormedMLP(_Normed, MLP):
    """Megatron's MLP with a norm of its output."""


_NORMS = tuple(
    layer_rule(f"{ours}.weight", Replicated(), hf(f"{theirs}.weight", "hidden"))
    for ours, theirs in (
        ("input_layernorm", "input_layernorm"),
        ("self_attention.post_layernorm", "post_attention_layernorm"),
        ("pre_mlp_layernorm", "pre_feedforward_layernorm"),
        ("mlp.post_layernorm", "post_feedforward_layernorm"),
    )
)


class Gemma3Family(MegatronFamily):
    """Layers with a norm before and after each part, and GELU."""

    scales_embeddings = True

    def settings(self, dimensions: ModelDimensions) -> dict[str, Any]:
        return super().settings(dimensions) | {
            "activation_func": partial(F.gelu, approximate="tanh"),
            "bias_activation_fusion": False,
        }

    def attention(self, config: TransformerConfig, layer: int, attention: ModuleSpec) -> ModuleSpec:
        attention.module = NormedAttention
        return super().attention(config, layer, attention)

    def mlp(self, mlp: Any) -> Any:
        return mlp_built_by(NormedMLP, mlp)

    def rules(self, dimensions: ModelDimensions) -> tuple[Rule, ...]:
        return (*OUTER, *_NORMS, *ATTENTION, *QK_NORM, *feed_forward(dimensions))
