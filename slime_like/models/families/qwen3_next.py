"""Qwen3-Next, and the language models of Qwen3.5 and Qwen3.6: gated delta nets, with attention in every few layers."""

from typing import Any

from slime_like.models import config_json
from slime_like.models.config_json import UnsupportedError, count, flag
from slime_like.models.dimensions import Attention, Family
from slime_like.models.linear_attention import LinearAttention

_MEGATRON = "backends.megatron.families.gated_delta:GatedDeltaFamily"
_FUSED = "backends.megatron.families.gated_delta:Qwen3NextFamily"


def _linear_layers(raw: dict[str, Any]) -> tuple[int, ...]:
    layers, every = count(raw, "num_hidden_layers"), count(raw, "full_attention_interval", 4)
    pattern = ["full_attention" if (index + 1) % every == 0 else "linear_attention" for index in range(layers)]
    kinds = raw.get("layer_types") or pattern
    if others := set(kinds) - {"linear_attention", "full_attention"}:
        raise UnsupportedError(f"layer_types has {others.pop()!r}")
    if "full_attention" not in kinds:
        raise UnsupportedError("no layer has attention")
    return tuple(index for index, kind in enumerate(kinds) if kind == "linear_attention")


def _read(raw: dict[str, Any], **features: Any) -> dict[str, Any]:
    config_json.require_unbiased_output(raw)
    linear = LinearAttention(
        layers=_linear_layers(raw),
        num_key_heads=count(raw, "linear_num_key_heads"),
        num_value_heads=count(raw, "linear_num_value_heads"),
        key_dim=count(raw, "linear_key_head_dim"),
        value_dim=count(raw, "linear_value_head_dim"),
        conv_width=count(raw, "linear_conv_kernel_dim"),
    )
    if linear.num_value_heads % linear.num_key_heads:
        raise ValueError(
            f"linear_num_key_heads={linear.num_key_heads} does not divide "
            f"linear_num_value_heads={linear.num_value_heads}"
        )
    fraction = config_json.rotary_fraction(raw, default=0.25)
    attention = Attention(rotary_fraction=fraction, output_gate=True, linear=linear)
    return config_json.decoder(raw, attention=attention, qk_norm=True, zero_centered_norms=True, **features)


def _with_experts(raw: dict[str, Any], normalized: bool = True) -> dict[str, Any]:
    experts, chosen = count(raw, "num_experts"), count(raw, "num_experts_per_tok")
    if chosen > experts:
        raise ValueError(f"num_experts_per_tok={chosen} is more than its {experts} experts")
    shared = count(raw, "shared_expert_intermediate_size")
    return _read(
        {"intermediate_size": shared, **raw},  # which Qwen3.5 has only without experts
        num_experts=experts,
        moe_top_k=chosen,
        moe_ffn_hidden_size=count(raw, "moe_intermediate_size"),
        moe_norm_topk_prob=normalized,
        moe_shared_ffn_hidden_size=shared,
        moe_shared_gate=True,
    )


def _qwen3_next(raw: dict[str, Any]) -> dict[str, Any]:
    return _with_experts(raw, flag(raw, "norm_topk_prob", default=True))


_SMALL = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 64, "linear_value_head_dim": 64,  # the smallest heads that vLLM computes on a CPU
}  # fmt: skip
_TINY = {"full_attention_interval": 2}
_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "shared_expert_intermediate_size": 96,
}  # fmt: skip

QWEN3_NEXT = Family("qwen3_next", "Qwen3NextForCausalLM", _qwen3_next, _FUSED, _SMALL, {**_TINY, **_EXPERTS})
QWEN3_5 = Family("qwen3_5_text", "Qwen3_5ForCausalLM", _read, _MEGATRON, _SMALL, _TINY)
QWEN3_5_MOE = Family(
    "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", _with_experts, _MEGATRON, _SMALL, {**_TINY, **_EXPERTS}
)
