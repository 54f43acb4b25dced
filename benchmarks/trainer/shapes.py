"""Models to measure, by name: published sizes, random weights."""

from pathlib import Path
from typing import Any

import torch
import transformers

from slime_like.examples.tiny_model import byte_tokenizer, tiny_config, without_progress_bar

_QWEN3: dict[str, Any] = {
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"max_position_embeddings": 40960},
    # The sizes of SmolLM2-135M.
    "135m": _QWEN3
    | {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9}
    | {"num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152},
    "0.6b": _QWEN3
    | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7b": _QWEN3
    | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4b": _QWEN3 | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    # A third of Qwen3-8B's layers, for a GPU of 80 GB.
    "8b-l12": _QWEN3
    | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 12, "num_attention_heads": 32},
    # The part of one of eight tensor-parallel ranks, with half of Qwen3-32B's layers.
    "32b-tp8": _QWEN3
    | {"hidden_size": 5120, "intermediate_size": 3200, "num_hidden_layers": 32, "num_attention_heads": 8}
    | {"num_key_value_heads": 1, "vocab_size": 18992, "tie_word_embeddings": False},
    # A few layers of Qwen3-30B-A3B with an eighth of its experts, as expert-parallel ranks hold them.
    "moe": _QWEN3
    | {"hidden_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 32, "num_key_value_heads": 4}
    | {"experts": 16, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    "tiny-moe": {"max_position_embeddings": 40960, "experts": 4},
}
"""Differences from ``tiny_config``; a number of experts makes the model a Qwen3-MoE."""

_BLOCK, _SHIFT = 1 << 20, 7919
_EXPERTS = "experts"


def write_checkpoint(shape: str, directory: Path, dtype: str) -> None:
    """Write a Hugging Face checkpoint of this shape in ``dtype`` within seconds.

    Weights repeat one block of noise with a standard deviation of 1 / sqrt(fan-in).
    """
    sizes = dict(SHAPES[shape])
    experts = sizes.pop(_EXPERTS, None)
    config = tiny_config("qwen3" if experts is None else "qwen3_moe", dtype=dtype, **sizes)
    if experts is not None:
        config.num_experts = experts
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.to_empty(device="cpu").tie_weights()
    noise = torch.randn(_BLOCK, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            if parameter.dim() == 1:
                parameter.fill_(1.0)
                continue
            block = (noise.roll(index * _SHIFT) * parameter.shape[-1] ** -0.5).to(parameter.dtype)
            for part in parameter.view(-1).split(_BLOCK):
                part.copy_(block[: len(part)])
    model.generation_config = transformers.GenerationConfig.from_model_config(config)
    with without_progress_bar():
        model.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
