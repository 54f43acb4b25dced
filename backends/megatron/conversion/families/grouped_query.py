"""Families with grouped-query attention: Llama 3.x, Mistral, Qwen2 and Qwen2.5, Qwen3, Qwen3-MoE."""

from backends.megatron.conversion.families.blocks import ATTENTION, EXPERTS, MLP, NORMS, OUTER, QK_NORM, QKV_BIAS
from backends.megatron.conversion.rules import Family

GROUPED_QUERY = (
    Family("llama", (*OUTER, *NORMS, *ATTENTION, *MLP)),
    Family("mistral", (*OUTER, *NORMS, *ATTENTION, *MLP)),
    Family("qwen2", (*OUTER, *NORMS, *ATTENTION, *QKV_BIAS, *MLP)),
    Family("qwen3", (*OUTER, *NORMS, *ATTENTION, *QK_NORM, *MLP)),
    Family("qwen3_moe", (*OUTER, *NORMS, *ATTENTION, *QK_NORM, *EXPERTS)),
)
