"""Dimensions of small and of published models, without their weights."""

from pathlib import Path
from typing import Any

from slime_like.models.dimensions import ModelDimensions
from tests.unit.checks.checkpoint import DEEPSEEK_V3

_SMALL: dict[str, Any] = {
    "family": "qwen3",
    "num_layers": 2,
    "hidden_size": 6,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 3,
    "ffn_hidden_size": 8,
    "vocab_size": 11,
    "max_position_embeddings": 64,
    "norm_eps": 1e-6,
    "rope_theta": 1e4,
    "rope_scaling": None,
    "tied_embeddings": False,
    "qkv_bias": False,
    "qk_norm": True,
    "eos_token_ids": (0,),
}


def dimensions(**changes: Any) -> ModelDimensions:
    return ModelDimensions(**{**_SMALL, **changes})


def _sizes(layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, ffn: int, vocab: int) -> dict[str, int]:
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "ffn_hidden_size": ffn,
        "vocab_size": vocab,
    }


PUBLISHED = {
    "Qwen3-32B": dimensions(**_sizes(64, 5120, 64, 8, 128, 25600, 151936)),
    "Qwen2.5-32B": dimensions(
        family="qwen2", qkv_bias=True, qk_norm=False, **_sizes(64, 5120, 40, 8, 128, 27648, 152064)
    ),
    "Qwen2.5-0.5B": dimensions(
        family="qwen2", qkv_bias=True, qk_norm=False, tied_embeddings=True, **_sizes(24, 896, 14, 2, 64, 4864, 151936)
    ),
    "Llama-3-70B": dimensions(family="llama", qk_norm=False, **_sizes(80, 8192, 64, 8, 128, 28672, 128256)),
    "Mistral-7B": dimensions(family="mistral", qk_norm=False, **_sizes(32, 4096, 32, 8, 128, 14336, 32768)),
    "Qwen3-30B-A3B": dimensions(
        family="qwen3_moe",
        num_experts=128,
        moe_top_k=8,
        moe_ffn_hidden_size=768,
        **_sizes(48, 2048, 32, 4, 128, 6144, 151936),
    ),
}
MOONLIGHT: dict[str, Any] = DEEPSEEK_V3 | {
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 11264,
    "max_position_embeddings": 8192,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": None,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 50000.0,
    "routed_scaling_factor": 2.446,
    "topk_group": 1,
    "vocab_size": 163840,
}
"""Moonlight-16B-A3B's, as published: queries that are not compressed, two shared experts."""

for _name, _config in (("DeepSeek-V3", DEEPSEEK_V3), ("Moonlight-16B-A3B", MOONLIGHT)):
    PUBLISHED[_name] = ModelDimensions._from_raw(_config | {"model_type": "deepseek_v3"}, Path(_name))
"""From each model's published config.json."""
