"""A checkpoint directory with a real ``config.json`` and weight files that have only headers."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

QWEN3_8_KV_HEADS: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 16,
    "num_hidden_layers": 12,
    "intermediate_size": 96,
    "vocab_size": 300,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "eos_token_id": 2,
}
EXPERTS: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
}
LINEAR: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": 128,
}
DEEPSEEK_V3: dict[str, Any] = json.loads((Path(__file__).parent / "deepseek_v3.json").read_text(encoding="utf-8"))
"""The published ``config.json`` without its quantization settings."""


def write_checkpoint(directory: Path, **changes: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    config = QWEN3_8_KV_HEADS | changes
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer_config.json").write_text("{}")
    if isinstance(config["num_hidden_layers"], int):
        write_weights(directory / "model.safetensors", range(config["num_hidden_layers"]))
    return directory


def write_weights(file: Path, layers: Iterable[int]) -> None:
    """Write a safetensors file with one number for every layer."""
    save_file({f"model.layers.{layer}.input_layernorm.weight": np.ones(1, np.float32) for layer in layers}, file)


def sound_flags(root: Path) -> list[str]:
    """Return flags of a valid configuration with files below ``root``. A test appends others."""
    write_checkpoint(root / "model")
    (root / "train.jsonl").write_text('{"prompt": "1+1=", "answer": "2", "response": "2"}\n')
    return [
        "--run_dir", str(root / "run"),
        "--model.path", str(root / "model"),
        "--data.train", str(root / "train.jsonl"),
        "--data.max_prompt_tokens", "512",
    ]  # fmt: skip
