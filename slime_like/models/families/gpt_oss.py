"""gpt-oss: attention with sinks, and windows in every other layer; experts with biases and a clamped activation."""

from typing import Any

from slime_like.models import config_json
from slime_like.models.config_json import UnsupportedError, count, flag
from slime_like.models.dimensions import Attention, Family

ALPHA, LIMIT = 1.702, 7.0
"""The activation is ``(up + 1) * gate * sigmoid(ALPHA * gate)``, with ``gate`` up to LIMIT, and ``up`` from -LIMIT."""


def _read(raw: dict[str, Any]) -> dict[str, Any]:
    if raw.get("quantization_config"):
        raise ValueError("quantization_config: MXFP4 experts are not trained; dequantize them with transformers")
    for key, only in (("swiglu_alpha", ALPHA), ("swiglu_limit", LIMIT)):
        if raw.get(key, only) != only:
            raise UnsupportedError(f"{key}={raw[key]} is not {only}")
    layers, experts, chosen = (
        count(raw, f"num_{name}") for name in ("hidden_layers", "local_experts", "experts_per_tok")
    )
    if chosen > experts:
        raise ValueError(f"num_experts_per_tok={chosen} is more than its {experts} experts")
    if not flag(raw, "attention_bias", default=True):
        raise UnsupportedError("its attention has no biases (attention_bias=false)")
    kinds = ["full_attention" if index % 2 else "sliding_attention" for index in range(layers)]
    return config_json.decoder(
        raw,
        attention=Attention(windows=config_json.windows(raw, kinds), sinks=True, output_bias=True),
        qkv_bias=True,
        num_experts=experts,
        moe_top_k=chosen,
        moe_ffn_hidden_size=count(raw, "intermediate_size"),
        moe_bias=True,
    )


GPT_OSS = Family(
    "gpt_oss",
    "GptOssForCausalLM",
    _read,
    "backends.megatron.families.gpt_oss:GptOssFamily",
    tiny={
        "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 96, "sliding_window": 8,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 128,
        },
    },
)  # fmt: skip
