"""Checkpoints of a language model with a vision tower. Only the language model is trained, on text.

Its settings and tensors are read under the names of the language model's own checkpoint. A checkpoint stores them under
other names, which differ between publishers and between versions of transformers.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from slime_like.models.config_json import read_object

_LANGUAGE_MODELS = {
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
    "glm4v_moe": ("glm4_moe", "Glm4MoeForCausalLM"),
    "mistral3": ("mistral", "MistralForCausalLM"),
    "qwen2_vl": ("qwen2", "Qwen2ForCausalLM"),
    "qwen2_5_vl": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3_vl": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3_5": ("qwen3_5_text", "Qwen3_5ForCausalLM"),
    "qwen3_5_moe": ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
}
"""By model type: type and architecture of a language model that computes the same on text. Multimodal rotary embedding
is plain rotary embedding there, because a text token has the same position on all axes."""

_LEFT_OUT = {
    "gemma3": {
        "vocab_size": 262_208, "head_dim": 256, "num_attention_heads": 8, "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6, "max_position_embeddings": 131_072, "tie_word_embeddings": True,
    }
}  # fmt: skip
"""By model type: settings of the language model that published files leave out, with transformers' values."""

_SHARED = ("eos_token_id", "bos_token_id", "pad_token_id", "dtype", "torch_dtype", "quantization_config")
"""Settings of the whole model that the language model's settings may leave out."""

_PLACEHOLDERS = ("image_token_id", "image_token_index", "video_token_id", "vision_start_token_id")

_INNER = re.compile(r"(model\.language_model|language_model\.model|model)\.(?=(embed_tokens|layers|norm)\.)")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_HEAD = re.compile(r"(language_model\.)?(?=(lm_head|score|v_head)\.)")

_KEY_MAPPING = {
    r"^model\.language_model\.": "model.",
    r"^language_model\.model\.": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
}
"""For ``from_pretrained`` of transformers: the same names as ``language_names``."""


def language_settings(raw: dict[str, Any]) -> dict[str, Any] | None:
    """Return the language model's own ``config.json``, or ``None`` if ``raw`` has no tower."""
    kind = raw.get("model_type")
    if not isinstance(kind, str) or kind not in _LANGUAGE_MODELS:
        return None
    own = raw.get("text_config")
    # Some publishers put the language model's settings next to the tower's.
    text = dict(own) if isinstance(own, dict) else {key: raw[key] for key in raw if key != "vision_config"}
    model_type, architecture = _LANGUAGE_MODELS[kind]
    if text.get("model_type", kind) not in (kind, f"{kind}_text", model_type):
        return None  # another language model, which may compute something else
    defaults = _LEFT_OUT.get(kind, {})
    ties = [each["tie_word_embeddings"] for each in (raw, text) if each.get("tie_word_embeddings") is not None]
    text = defaults | {key: raw[key] for key in _SHARED if key in raw} | text
    text["tie_word_embeddings"] = any(ties) if ties else bool(defaults.get("tie_word_embeddings"))
    for key in ("rope_scaling", "rope_parameters"):
        if isinstance(text.get(key), dict):
            plain = {name: "default" if value == "mrope" else value for name, value in text[key].items()}
            text[key] = {name: value for name, value in plain.items() if not name.startswith("mrope_")}
    return {**text, "model_type": model_type, "architectures": [architecture]}


def has_tower(directory: Path) -> bool:
    """Return whether a directory's ``config.json`` describes a model with a tower."""
    file = directory / "config.json"
    return file.is_file() and language_settings(read_object(file)) is not None


def placeholder_ids(directory: Path) -> frozenset[int]:
    """Return the ids of tokens that represent images and videos; none for a model without a tower."""
    raw = read_object(directory / "config.json") if has_tower(directory) else {}
    return frozenset(raw[key] for key in _PLACEHOLDERS if isinstance(raw.get(key), int))


def language_names(directory: Path, stored: Iterable[str]) -> dict[str, str]:
    """Map the stored names of the language model's tensors to the names in its own checkpoint.

    Without a tower, they keep their names. The other tensors belong to the tower or to layers for multi-token
    prediction, which follow the model's own.
    """
    file = directory / "config.json"
    raw = read_object(file) if file.is_file() else {}
    settings = language_settings(raw)
    own = {name: name if settings is None else own_name(name) for name in stored}
    first, drafts = (((settings or raw).get(key)) for key in ("num_hidden_layers", "num_nextn_predict_layers"))
    later = range(first, first + drafts) if isinstance(first, int) and isinstance(drafts, int) else range(0)

    def is_draft(name: str) -> bool:
        layer = _LAYER.match(name)
        return name.startswith("mtp.") or (layer is not None and int(layer[1]) in later)

    return {name: ours for name, ours in own.items() if ours is not None and not is_draft(ours)}


def own_name(name: str) -> str | None:
    """Return the name that a stored tensor has in the language model's own checkpoint; ``None`` if it has none."""
    if _HEAD.match(name):
        return _HEAD.sub("", name, count=1)
    return _INNER.sub("model.", name, count=1) if _INNER.match(name) else None


def transformers_config(directory: Path, trust_remote_code: bool = False) -> Any:
    """Return transformers' configuration of a checkpoint, or of its language model if it has a tower."""
    from transformers import AutoConfig

    file = directory / "config.json"
    settings = language_settings(read_object(file)) if file.is_file() else None
    if settings is None:
        return AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    return AutoConfig.for_model(**settings)


def loading_options(directory: Path, trust_remote_code: bool = False) -> dict[str, Any]:
    """Return the options with which ``AutoModelForCausalLM.from_pretrained`` reads a checkpoint's language model."""
    config = transformers_config(directory, trust_remote_code)
    return {"config": config, "key_mapping": _KEY_MAPPING if has_tower(directory) else None}
