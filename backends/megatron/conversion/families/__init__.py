"""One adapter per model family. To add one: write its rule table in a file here and list it in ``_FAMILIES``."""

from backends.megatron.conversion.families.blocks import ATTENTION, EXPERTS, MLP, NORMS, OUTER, QK_NORM, QKV_BIAS
from backends.megatron.conversion.families.deepseek_v3 import DEEPSEEK_V3
from backends.megatron.conversion.rules import Family
from slime_like.errors import CheckpointError
from slime_like.models.dimensions import ModelDimensions

_GROUPED_QUERY = (
    Family("llama", (*OUTER, *NORMS, *ATTENTION, *MLP)),
    Family("mistral", (*OUTER, *NORMS, *ATTENTION, *MLP)),
    Family("qwen2", (*OUTER, *NORMS, *ATTENTION, *QKV_BIAS, *MLP)),
    Family("qwen3", (*OUTER, *NORMS, *ATTENTION, *QK_NORM, *MLP)),
    Family("qwen3_moe", (*OUTER, *NORMS, *ATTENTION, *QK_NORM, *EXPERTS)),
)
_FAMILIES = {family.name: family for family in (*_GROUPED_QUERY, DEEPSEEK_V3)}


def family_of(dimensions: ModelDimensions) -> Family:
    """Return the adapter of a model.

    Raises:
        CheckpointError: its family has no adapter.
    """
    if dimensions.foreign is not None:
        raise CheckpointError(
            f"{dimensions.foreign}, which has no conversion to Megatron",
            code="no-weight-adapter",
            remedy="train it with trainer.backend=fsdp, or add an adapter in backends/megatron/conversion/families",
        )
    if dimensions.family not in _FAMILIES:
        raise CheckpointError(
            f"model family {dimensions.family} has no weight adapter; known: {', '.join(_FAMILIES)}",
            code="no-weight-adapter",
            remedy="add one in backends/megatron/conversion/families",
        )
    return _FAMILIES[dimensions.family]
