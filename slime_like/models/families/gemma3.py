"""Gemma 3's language model: windows in most layers, norms before and after every part, and tied embeddings."""

from typing import Any

from slime_like.models import config_json
from slime_like.models.config_json import UnsupportedError, count
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
    # transformers 5 gives every kind of layer its rotary embedding; that of layers with windows is never scaled.
    rotary = raw.get("rope_parameters") or {}
    rotary = rotary.get("full_attention", rotary) if isinstance(rotary, dict) else rotary
    defaults = {"tie_word_embeddings": True, "sliding_window": 4096, "rope_theta": 1e6}
    given = {**defaults, **raw, "rope_parameters": rotary}
    return config_json.decoder(
        given,
        attention=Attention(windows=config_json.windows(given, kinds)),
        qk_norm=True,
        zero_centered_norms=True,
        post_norms=True,
    ) | {"max_position_embeddings": count(raw, "max_position_embeddings", 131_072)}  # which includes any scaling


GEMMA3 = Family(
    "gemma3_text",
    "Gemma3ForCausalLM",
    _read,
    megatron="",
    tiny={"sliding_window": 8, "sliding_window_pattern": 2, "query_pre_attn_scalar": 24, "tie_word_embeddings": True},
)
