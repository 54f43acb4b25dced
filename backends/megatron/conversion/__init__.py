"""Hugging Face weights to Megatron's shards and back.

One table of rules per model family (``families/``) lists the tensors of each parameter; ``transforms`` defines their
layout in it. Loading, exporting and saving all follow these two, for any parallel layout.
"""

from backends.megatron.conversion.export import export_buckets, export_gradients, save_hf
from backends.megatron.conversion.placement import load_hf_weights

__all__ = ["export_buckets", "export_gradients", "load_hf_weights", "save_hf"]
