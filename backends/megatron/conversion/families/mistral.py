"""Mistral."""

from backends.megatron.conversion.families.blocks import ATTENTION, MLP, NORMS, OUTER
from backends.megatron.conversion.rules import Family

MISTRAL = Family("mistral", (*OUTER, *NORMS, *ATTENTION, *MLP))
