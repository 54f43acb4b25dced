"""Qwen3, with normalised queries and keys."""

from backends.megatron.conversion.families.blocks import ATTENTION, MLP, NORMS, OUTER, QK_NORM
from backends.megatron.conversion.rules import Family

QWEN3 = Family("qwen3", (*OUTER, *NORMS, *ATTENTION, *QK_NORM, *MLP))
