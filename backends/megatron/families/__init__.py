"""Megatron's side of model families: settings, layers, and the rules of their tensors.

``slime_like.models.families`` registers the families. A family with a new kind of layers names its own class.
"""

from importlib import import_module
from typing import Any, ClassVar

import torch
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from backends.megatron.attention import PackedCoreAttention
from backends.megatron.families.rules import (
    ATTENTION,
    EMBEDDING,
    NORMS,
    OUTER,
    OUTPUT_BIAS,
    OUTPUT_LAYER,
    QK_NORM,
    QKV_BIAS,
    SINKS,
    HfTensor,
    Rule,
    feed_forward,
)
from backends.megatron.families.transforms import Replicated, Shape, Vocabulary
from backends.megatron.norm import RMSNorm
from slime_like.errors import CheckpointError
from slime_like.models.dimensions import FAMILIES, VALUE_HEAD, ModelDimensions

TIED_OUTPUT = Rule(OUTPUT_LAYER, Vocabulary(), (EMBEDDING,), exported=False)
VALUES = Rule(VALUE_HEAD, Replicated(), (HfTensor(VALUE_HEAD, (1, "hidden")),))


class MegatronFamily:
    """Layers with grouped-query attention, with or without biases, norms of heads, and experts.

    A subclass overrides what another kind of layers needs.

    Attributes:
        config: Megatron's class of configurations.
        scales_embeddings: embeddings are multiplied by the square root of the hidden size.
        experts: module of all experts of a layer, if it is not one of the usual ones.
        fused_norms: prefixes of the attention's norms in our layers, and in Transformer Engine's, which are canonical.
    """

    config: ClassVar[type[TransformerConfig]] = TransformerConfig
    scales_embeddings: ClassVar[bool] = False
    experts: ClassVar[type[torch.nn.Module] | None] = None
    fused_norms: ClassVar[dict[str, str]] = {"input_layernorm.": "self_attention.linear_qkv.layer_norm_"}

    def settings(self, dimensions: ModelDimensions) -> dict[str, Any]:
        """Return this family's Megatron settings. They override the common ones."""
        attention = dimensions.attention
        return {
            "qk_layernorm": dimensions.qk_norm,
            "add_qkv_bias": dimensions.qkv_bias,
            # Only ``PackedCoreAttention`` reads these two: the window of every layer (0 for none), and sinks.
            "window_attn_skip_freq": [window or 0 for window in attention.windows] or None,
            "softmax_type": "learnable" if attention.sinks else "vanilla",
        }

    def attention(self, config: TransformerConfig, layer: int, attention: ModuleSpec) -> ModuleSpec:
        """Return the attention of the model's layer with index ``layer``, made from Megatron's local ``attention``."""
        attention.submodules.core_attention = PackedCoreAttention
        if config.qk_layernorm:
            attention.submodules.q_layernorm = attention.submodules.k_layernorm = RMSNorm
        return attention

    def mlp(self, mlp: Any) -> Any:
        """Return a layer's feed-forward part, made from Megatron's local ``mlp``."""
        return mlp

    def rules(self, dimensions: ModelDimensions) -> tuple[Rule, ...]:
        """Return the rules of all tensors. A rule without a layer in this model is ignored."""
        biases = QKV_BIAS if dimensions.qkv_bias else ()
        norms = QK_NORM if dimensions.qk_norm else ()
        output = OUTPUT_BIAS if dimensions.attention.output_bias else ()
        sinks = SINKS if dimensions.attention.sinks else ()
        return (*OUTER, *NORMS, *ATTENTION, *biases, *norms, *output, *sinks, *feed_forward(dimensions))

    def rules_for(self, dimensions: ModelDimensions) -> tuple[Rule, ...]:
        """Return the rules of one model. A tied head is read from the embedding and never exported."""
        rules = (rule for rule in self.rules(dimensions) if any(True for _ in rule.instances(dimensions)))
        if not (dimensions.tied_embeddings or dimensions.values):
            return tuple(rules)
        output = VALUES if dimensions.values else TIED_OUTPUT
        return tuple(output if rule.megatron == OUTPUT_LAYER else rule for rule in rules)

    def hf_shapes(self, dimensions: ModelDimensions) -> dict[str, Shape]:
        """Return the name and shape of every Hugging Face tensor of the model."""
        return {
            source.name.format(layer=layer, expert=expert): shape
            for rule in self.rules_for(dimensions)
            for source, shape in zip(rule.sources, rule.shapes(dimensions), strict=True)
            for layer, expert in rule.instances(dimensions)
        }


def family_of(dimensions: ModelDimensions) -> MegatronFamily:
    """Return Megatron's side of a model's family. Raises ``CheckpointError`` if the family is not registered."""
    known = FAMILIES.get(dimensions.family)
    if known is None or not known.megatron:
        reason = dimensions.attention.unsupported or f"model family {dimensions.family} is not registered"
        raise CheckpointError(
            f"{reason}, so there is no conversion to Megatron",
            code="no-weight-adapter",
            remedy="train it with trainer.backend=fsdp, or add the family in slime_like/models/families",
        )
    module, _, name = known.megatron.partition(":")
    family: MegatronFamily = getattr(import_module(module), name)()
    return family
