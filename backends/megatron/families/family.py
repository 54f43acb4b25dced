"""Megatron's side of a model family: settings, attention, and the rules of its tensors."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from backends.megatron.families.rules import EMBEDDING, OUTPUT_LAYER, Rule
from backends.megatron.families.transforms import Shape, Vocabulary
from slime_like.models.dimensions import ModelDimensions

TIED_OUTPUT = Rule(OUTPUT_LAYER, Vocabulary(), (EMBEDDING,), exported=False)


@dataclass(frozen=True, slots=True)
class MegatronFamily:
    """How Megatron builds the layers of some families, and where their tensors are.

    Attributes:
        settings: returns fields of ``config`` for a model; they override those of a Llama.
        attention: returns the attention of one layer, given the configuration, the layer's index in the model, and
            Megatron's local attention.
        fused_norms: prefixes of the attention's norms in our layers, and in Transformer Engine's, which are canonical.
        rules: returns the rules of a model's tensors; a rule without a layer in this model is ignored.
        config: Megatron's class of configurations.
    """

    settings: Callable[[ModelDimensions], dict[str, Any]]
    attention: Callable[[TransformerConfig, int, ModuleSpec], ModuleSpec]
    fused_norms: dict[str, str]
    rules: Callable[[ModelDimensions], tuple[Rule, ...]]
    config: type[TransformerConfig] = TransformerConfig

    def rules_for(self, dimensions: ModelDimensions) -> tuple[Rule, ...]:
        """Return the rules of one model. A tied head is read from the embedding and never exported."""
        rules = (rule for rule in self.rules(dimensions) if any(True for _ in rule.instances(dimensions)))
        if not dimensions.tied_embeddings:
            return tuple(rules)
        return tuple(TIED_OUTPUT if rule.megatron == OUTPUT_LAYER else rule for rule in rules)

    def hf_shapes(self, dimensions: ModelDimensions) -> dict[str, Shape]:
        """Return the name and shape of every Hugging Face tensor of the model."""
        return {
            source.name.format(layer=layer, expert=expert): shape
            for rule in self.rules_for(dimensions)
            for source, shape in zip(rule.sources, rule.shapes(dimensions), strict=True)
            for layer, expert in rule.instances(dimensions)
        }
