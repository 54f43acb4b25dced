"""Llama and Mistral."""

from typing import Any

from slime_like.models import config_json
from slime_like.models.config_json import UnsupportedError
from slime_like.models.family import Family

_WINDOW = 4096
"""Mistral's window if config.json has none, as in transformers; null means no window."""


def _llama(raw: dict[str, Any]) -> dict[str, Any]:
    config_json.require_unbiased_output(raw)
    if config_json.flag(raw, "mlp_bias"):
        raise UnsupportedError("its MLPs have biases (mlp_bias=true)")
    return config_json.decoder(raw)


def _mistral(raw: dict[str, Any]) -> dict[str, Any]:
    if raw.get("sliding_window", _WINDOW):
        raise UnsupportedError(config_json.SLIDES)
    return config_json.decoder(raw, qkv_bias=config_json.flag(raw, "attention_bias"))


LLAMA = Family(
    "llama",
    "LlamaForCausalLM",
    _llama,
    tiny={
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 128,
        }
    },
)
MISTRAL = Family("mistral", "MistralForCausalLM", _mistral, tiny={"sliding_window": None})
