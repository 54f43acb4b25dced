"""One adapter per model family. To add one: write its rule table in a file here and list it in ``_FAMILIES``."""

from backends.megatron.conversion.families.deepseek_v3 import DEEPSEEK_V3
from backends.megatron.conversion.families.llama import LLAMA
from backends.megatron.conversion.families.mistral import MISTRAL
from backends.megatron.conversion.families.qwen2 import QWEN2
from backends.megatron.conversion.families.qwen3 import QWEN3
from backends.megatron.conversion.families.qwen3_moe import QWEN3_MOE
from backends.megatron.conversion.rules import Family
from slime_like.errors import CheckpointError
from slime_like.models.dimensions import ModelDimensions

_FAMILIES = {family.name: family for family in (LLAMA, MISTRAL, QWEN2, QWEN3, QWEN3_MOE, DEEPSEEK_V3)}


def family_of(dimensions: ModelDimensions) -> Family:
    """The adapter of a model.

    Raises:
        CheckpointError: none is written for its family.
    """
    if dimensions.foreign is not None:
        raise CheckpointError(
            f"{dimensions.foreign}, for which there is no conversion to Megatron; train it with trainer.backend=fsdp, "
            "or add an adapter in backends/megatron/conversion/families"
        )
    if dimensions.family not in _FAMILIES:
        raise CheckpointError(
            f"model family {dimensions.family} has no weight adapter; known: {', '.join(_FAMILIES)}; "
            "add one in backends/megatron/conversion/families"
        )
    return _FAMILIES[dimensions.family]
