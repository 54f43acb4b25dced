"""Llama 3.x."""

from backends.megatron.conversion.families.blocks import ATTENTION, MLP, NORMS, OUTER
from backends.megatron.conversion.rules import Family

LLAMA = Family("llama", (*OUTER, *NORMS, *ATTENTION, *MLP))
