"""Qwen3-MoE, whose layers have experts instead of one feed-forward network."""

from backends.megatron.conversion.families.blocks import ATTENTION, EXPERTS, NORMS, OUTER, QK_NORM
from backends.megatron.conversion.rules import Family

QWEN3_MOE = Family("qwen3_moe", (*OUTER, *NORMS, *ATTENTION, *QK_NORM, *EXPERTS))
