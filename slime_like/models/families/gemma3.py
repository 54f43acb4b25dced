"""Gemma 3's language model: windows in most layers, norms before and after every part, and tied embeddings."""

from typing import Any

from slime_like.models import config_json
from slime_like.models.config_json import UnsupportedError, count, number
from slime_like.models.dimensions import Attention, Family


def _read(raw: dict[str, Any]) -> dict[str, Any]:
    config_json.require_unbiased_output(raw)
    plain = {
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": None,
        "use_bidirectional_attention": False,
    }
    for key, only in plain.items():
        if (raw.get(key) or only) != only:
            raise UnsupportedError(f"{key}={raw[key]} is not {only}")
    layers, every = count(raw, "num_hidden_layers"), count(raw, "sliding_window_pattern", 6)
    kinds = ["sliding_attention" if (index + 1) % every else "full_attention" for index in range(layers)]
    # transformers 5 has one rotary embedding per kind of layer. Layers with windows never scale theirs.
    rotary = raw.get("rope_parameters") or {}
    sliding = {"rope_theta": raw.get("rope_local_base_freq", 10_000.0)}
    if isinstance(rotary, dict):
        sliding, rotary = rotary.get("sliding_attention", sliding), rotary.get("full_attention", rotary)
    defaults = {"tie_word_embeddings": True, "sliding_window": 4096, "rope_theta": 1e6}
    given = {**defaults, **raw, "rope_parameters": rotary}
    return config_json.decoder(
        given,
        attention=Attention(
            windows=config_json.windows(given, kinds),
            window_theta=number(sliding, "rope_theta"),
            scale=number({"query_pre_attn_scalar": 256, **raw}, "query_pre_attn_scalar") ** -0.5,
        ),
        qk_norm=True,
        zero_centered_norms=True,
        post_norms=True,
        capped_logits=raw.get("final_logit_softcapping") is not None,
    ) | {"max_position_embeddings": count(raw, "max_position_embeddings", 131_072)}  # which includes any scaling


GEMMA3 = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    _read,
    megatron="backends.megatron.families.gemma3:Gemma3Family",
    tiny={"sliding_window": 8, "sliding_window_pattern": 2, "query_pre_attn_scalar": 24, "tie_word_embeddings": True},
)
