"""Dimensions of small and of published models, without their weights."""

from pathlib import Path
from typing import Any

from slime_like.models.dimensions import ModelDimensions
from tests.unit.checks.checkpoint import DEEPSEEK_V3

_SMALL: dict[str, Any] = {
    "family": "qwen3", "num_layers": 2, "hidden_size": 6, "num_heads": 8, "num_kv_heads": 4, "head_dim": 3,
    "ffn_hidden_size": 8, "vocab_size": 11, "max_position_embeddings": 64, "norm_eps": 1e-6, "rope_theta": 1e4,
    "rope_scaling": None, "tied_embeddings": False, "qkv_bias": False, "qk_norm": True, "eos_token_ids": (0,),
}  # fmt: skip


def dimensions(**changes: Any) -> ModelDimensions:
    return ModelDimensions(**{**_SMALL, **changes})


_SIZES = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "ffn_hidden_size", "vocab_size")


def _sized(*sizes: int, **changes: Any) -> ModelDimensions:
    return dimensions(**dict(zip(_SIZES, sizes, strict=True)), **changes)


_QWEN2: dict[str, Any] = {"family": "qwen2", "qkv_bias": True, "qk_norm": False}
_EXPERTS: dict[str, Any] = {"num_experts": 128, "moe_top_k": 8, "moe_ffn_hidden_size": 768}
PUBLISHED = {
    "Qwen3-32B": _sized(64, 5120, 64, 8, 128, 25600, 151936),
    "Qwen2.5-32B": _sized(64, 5120, 40, 8, 128, 27648, 152064, **_QWEN2),
    "Qwen2.5-0.5B": _sized(24, 896, 14, 2, 64, 4864, 151936, tied_embeddings=True, **_QWEN2),
    "Llama-3-70B": _sized(80, 8192, 64, 8, 128, 28672, 128256, family="llama", qk_norm=False),
    "Mistral-7B": _sized(32, 4096, 32, 8, 128, 14336, 32768, family="mistral", qk_norm=False),
    "Qwen3-30B-A3B": _sized(48, 2048, 32, 4, 128, 6144, 151936, family="qwen3_moe", **_EXPERTS),
}
MOONLIGHT: dict[str, Any] = DEEPSEEK_V3 | {
    "first_k_dense_replace": 1, "hidden_size": 2048, "intermediate_size": 11264, "max_position_embeddings": 8192,
    "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2,
    "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16,
    "num_nextn_predict_layers": 0, "q_lora_rank": None, "rms_norm_eps": 1e-05, "rope_scaling": None,
    "rope_theta": 50000.0, "routed_scaling_factor": 2.446, "topk_group": 1, "vocab_size": 163840,
}  # fmt: skip
"""Published config.json of Moonlight-16B-A3B, with uncompressed queries and two shared experts."""

for _name, _config in (("DeepSeek-V3", DEEPSEEK_V3), ("Moonlight-16B-A3B", MOONLIGHT)):
    PUBLISHED[_name] = ModelDimensions._from_raw(_config | {"model_type": "deepseek_v3"}, Path(_name))
