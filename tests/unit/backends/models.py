"""Dimensions of small and of published models, without their weights."""

from typing import Any

from slime_like.models.config_json import LatentAttention
from slime_like.models.dimensions import ModelDimensions

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
_DEEPSEEK: dict[str, Any] = {
    "family": "deepseek_v3",
    "qk_norm": False,
    "num_experts": 256,
    "moe_top_k": 8,
    "moe_sigmoid": True,
    "moe_groups": 8,
    "moe_top_groups": 4,
    "moe_scaling": 2.5,
    "dense_layers": 3,
    "moe_ffn_hidden_size": 2048,
    "moe_shared_ffn_hidden_size": 2048,
    "draft_layers": 1,
}
PUBLISHED["DeepSeek-V3"] = dimensions(
    latent=LatentAttention(1536, 512, 128, 64, 128), **_DEEPSEEK, **_sizes(61, 7168, 128, 128, 192, 18432, 129280)
)
PUBLISHED["Moonlight-16B-A3B"] = dimensions(
    latent=LatentAttention(None, 512, 128, 64, 128),
    **_DEEPSEEK
    | {
        "num_experts": 64,
        "moe_top_k": 6,
        "moe_groups": 1,
        "moe_top_groups": 1,
        "dense_layers": 1,
        "moe_ffn_hidden_size": 1408,
        "moe_shared_ffn_hidden_size": 2816,
        "draft_layers": 0,
    },
    **_sizes(27, 2048, 16, 16, 192, 11264, 163840),
)
"""From each model's published config.json."""
