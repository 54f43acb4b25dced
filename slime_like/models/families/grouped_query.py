"""Llama and similar models: grouped-query attention, with or without biases, norms of heads, and experts."""

from typing import Any

from slime_like.models import config_json
from slime_like.models.config_json import UnsupportedError, count, flag
from slime_like.models.dimensions import Attention, Family

_WINDOW = 4096
"""Mistral's window if config.json has none, as in transformers; null means no window."""


def _llama(raw: dict[str, Any]) -> dict[str, Any]:
    config_json.require_unbiased_output(raw)
    if flag(raw, "mlp_bias"):
        raise UnsupportedError("its MLPs have biases (mlp_bias=true)")
    return config_json.decoder(raw)


def _mistral(raw: dict[str, Any]) -> dict[str, Any]:
    attention = Attention(windows=config_json.windows({"sliding_window": _WINDOW, **raw}))
    return config_json.decoder(raw, attention=attention, qkv_bias=flag(raw, "attention_bias"))


def _qwen2(raw: dict[str, Any]) -> dict[str, Any]:
    return config_json.decoder(raw, qkv_bias=True)


def _qwen3(raw: dict[str, Any], **experts: Any) -> dict[str, Any]:
    config_json.require_unbiased_output(raw)
    return config_json.decoder(raw, qk_norm=True, **experts)


def _qwen3_moe(raw: dict[str, Any]) -> dict[str, Any]:
    # transformers 5 writes num_local_experts, earlier ones num_experts.
    experts = count(raw, "num_local_experts" if raw.get("num_local_experts") else "num_experts")
    chosen = count(raw, "num_experts_per_tok")
    if chosen > experts:
        raise ValueError(f"num_experts_per_tok={chosen} is more than its {experts} experts")
    return _qwen3(
        raw,
        num_experts=experts,
        moe_top_k=chosen,
        moe_ffn_hidden_size=count(raw, "moe_intermediate_size"),
        moe_norm_topk_prob=flag(raw, "norm_topk_prob"),
    )


def _glm4_moe(raw: dict[str, Any]) -> dict[str, Any]:
    return config_json.decoder(
        raw,
        attention=Attention(rotary_fraction=config_json.rotary_fraction(raw, default=0.5)),
        qkv_bias=flag(raw, "attention_bias"),
        qk_norm=flag(raw, "use_qk_norm"),
        **config_json.sigmoid_experts(raw),
    )


LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    _llama,
    tiny={
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 128,
        }
    },
)  # fmt: skip
MISTRAL = Family("mistral", "MistralForCausalLM", _mistral, tiny={"sliding_window": None})
QWEN2 = Family("qwen2", "Qwen2ForCausalLM", _qwen2, tiny={"tie_word_embeddings": True})
QWEN3 = Family("qwen3", "Qwen3ForCausalLM", _qwen3)
QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    _qwen3_moe,
    tiny={"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True},
)
GLM4_MOE = Family(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    _glm4_moe,
    tiny={
        "attention_bias": True, "use_qk_norm": True, "first_k_dense_replace": 1, "n_routed_experts": 8,
        "num_experts_per_tok": 4, "moe_intermediate_size": 48, "routed_scaling_factor": 2.5, "num_mtp_layers": 0,
    },
)  # fmt: skip
