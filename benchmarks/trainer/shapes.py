"""Models to measure, by name: sizes as published, random weights."""

from pathlib import Path
from typing import Any

from slime_like.examples.tiny_model import make_tiny_model

_QWEN3: dict[str, Any] = {
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"max_position_embeddings": 40960},
    "0.6b": _QWEN3
    | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7b": _QWEN3
    | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4b": _QWEN3 | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
}
"""What differs from the tiny Qwen3 of ``make_tiny_model``."""


def write_checkpoint(shape: str, directory: Path, dtype: str) -> None:
    """A Hugging Face checkpoint of that shape, in ``dtype``. Its weights are made in float32 in memory first."""
    make_tiny_model(directory, dtype=dtype, **SHAPES[shape])
