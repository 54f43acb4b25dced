"""Qwen2 and Qwen2.5, with biases on query, key and value."""

from backends.megatron.conversion.families.blocks import ATTENTION, MLP, NORMS, OUTER, QKV_BIAS
from backends.megatron.conversion.rules import Family

QWEN2 = Family("qwen2", (*OUTER, *NORMS, *ATTENTION, *QKV_BIAS, *MLP))
