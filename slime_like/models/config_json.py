"""Read a checkpoint's ``config.json`` into the names of ``ModelDimensions``.

Every reader raises ``KeyError`` for a missing key, ``ValueError`` for a value of the wrong kind, and
``UnsupportedError`` for a feature outside this project's formulas.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime_like.errors import ConfigError


class UnsupportedError(Exception):
    """A feature outside this project's formulas; the message completes a sentence about ``config.json``."""


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Raises:
        ConfigError: the file holds something else.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON ({error}); re-download or re-export the checkpoint") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: not a JSON object; re-download or re-export the checkpoint")
    return raw


def _sizes(raw: dict[str, Any]) -> dict[str, Any]:
    """Read the sizes shared by all supported families."""
    shape = _shape(raw)
    heads, hidden, layers = shape["num_heads"], shape["hidden_size"], shape["num_layers"]
    kinds = raw.get("layer_types")
    if isinstance(kinds, list) and len(kinds) != layers:
        raise ValueError(f"num_hidden_layers={layers}, but layer_types has {len(kinds)} entries")
    if raw.get("head_dim") is None and raw.get("kv_lora_rank") is None and hidden % heads:
        raise ValueError(f"num_attention_heads={heads} does not divide hidden_size={hidden}, and there is no head_dim")
    groups = shape["num_kv_heads"]
    if heads % groups:
        raise ValueError(f"num_key_value_heads={groups} does not divide num_attention_heads={heads}")
    return {**shape, "norm_eps": number(raw, "rms_norm_eps"), "tied_embeddings": flag(raw, "tie_word_embeddings")}


def _shape(raw: dict[str, Any], feed_forward: int | None = None) -> dict[str, int]:
    """Read the sizes that every decoder has. An MLP without a size is ``feed_forward`` times the hidden size."""
    hidden, heads, layers = (count(raw, key) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": count(raw, "num_key_value_heads", heads),
        "head_dim": count(raw, "head_dim", max(1, hidden // heads)),
        "ffn_hidden_size": count(raw, "intermediate_size", None if feed_forward is None else feed_forward * hidden),
        "vocab_size": count(raw, "vocab_size"),
        "max_position_embeddings": count(raw, "max_position_embeddings"),
    }


_CONTEXT, _ORIGINAL = "max_position_embeddings", "original_max_position_embeddings"
_SCALINGS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "yarn": ("factor", _ORIGINAL),
}
"""Supported scalings of rotary embedding, and the parameters each one requires."""


def _rotary(raw: dict[str, Any]) -> dict[str, Any]:
    """Read either spelling: ``rope_theta`` with ``rope_scaling``, or transformers 5's ``rope_parameters``.

    Absent settings have transformers' values: a base of 10,000, and ``max_position_embeddings`` as the original length.
    Engines serve a linear scaling's factor times ``max_position_embeddings``; for YaRN, they serve it unchanged.
    """
    readings = [_rope(raw, key) for key in ("rope_parameters", "rope_scaling") if raw.get(key)] or [_rope(raw, "")]
    if readings[0] != readings[-1]:
        # transformers then reads rope_scaling, and loses the rope_theta in rope_parameters
        raise ValueError("rope_parameters and rope_scaling contradict each other; keep one, with its rope_theta")
    scaling = readings[0]["rope_scaling"]
    if scaling is not None and scaling["rope_type"] == "linear":
        return readings[0] | {"max_position_embeddings": int(count(raw, _CONTEXT) * scaling["factor"])}
    return readings[0]


def _rope(raw: dict[str, Any], key: str) -> dict[str, Any]:
    given = raw.get(key) or {}
    if not isinstance(given, dict):
        raise ValueError(f"{key}={given!r} must be an object")
    parameters = dict(given)
    kind = parameters.setdefault("rope_type", parameters.pop("type", "default"))
    theta = parameters.pop("rope_theta", None) or raw.get("rope_theta", 10_000.0)
    if not isinstance(kind, str) or kind not in _SCALINGS:
        raise UnsupportedError(f"rope scaling {kind!r} is not one of {', '.join(_SCALINGS)}")
    if _ORIGINAL in _SCALINGS[kind]:
        parameters[_ORIGINAL] = raw.get(_ORIGINAL) or parameters.get(_ORIGINAL) or count(raw, _CONTEXT)
    for name in _SCALINGS[kind]:
        number(parameters, name)
    return {
        "rope_theta": number({"rope_theta": theta}, "rope_theta"),
        "rope_scaling": None if kind == "default" else parameters,
    }


def rotary_fraction(raw: dict[str, Any], default: float = 1.0) -> float:
    """Read the part of a head that has rotary embedding."""
    key = "partial_rotary_factor"
    given = (raw.get("rope_parameters"), raw.get("rope_scaling"), raw, {key: default})
    fraction = number(next(each for each in given if isinstance(each, dict) and key in each), key)
    if fraction > 1:
        raise ValueError(f"{key}={fraction:g} must be at most 1")
    return fraction


def decoder(raw: dict[str, Any], **features: Any) -> dict[str, Any]:
    """Read a decoder with RMSNorms, SwiGLU and attention to all earlier tokens; ``features`` are its family's."""
    if raw.get("hidden_act", "silu") != "silu":
        raise UnsupportedError(f"hidden_act={raw['hidden_act']} is not silu (SwiGLU)")
    if raw.get("use_sliding_window"):
        raise UnsupportedError("only some of its layers have a sliding window")
    sparse = (raw.get("decoder_sparse_step", 1), raw.get("moe_layer_freq", 1))
    if raw.get("mlp_only_layers") or sparse != (1, 1):
        raise UnsupportedError("it has layers without experts between layers with experts")
    return {**_sizes(raw), **_rotary(raw), **features}


def sigmoid_experts(raw: dict[str, Any]) -> dict[str, Any]:
    """Read DeepSeek-V3's kind of experts: sigmoid routers, leading dense layers, and shared experts."""
    layers, experts = count(raw, "num_hidden_layers"), count(raw, "n_routed_experts")
    top_k, dense = count(raw, "num_experts_per_tok"), count(raw, "first_k_dense_replace", least=0)
    groups, top_groups = count(raw, "n_group"), count(raw, "topk_group")
    for key, only in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("norm_topk_prob", True)):
        if raw.get(key, only) != only:
            raise UnsupportedError(f"{key}={raw[key]} is not {only}")
    if dense >= layers:
        raise UnsupportedError(f"first_k_dense_replace={dense} leaves no layer of {layers} with experts")
    if top_k < 2 or (groups > 1 and top_k // top_groups != 2):
        raise UnsupportedError(
            f"num_experts_per_tok={top_k} is not two experts for each of topk_group={top_groups} groups, which "
            "Megatron needs to rank groups by their best two experts, like DeepSeek-V3"
        )
    if experts % groups:
        raise ValueError(f"n_group={groups} does not divide n_routed_experts={experts}")
    ffn = count(raw, "moe_intermediate_size")
    return {
        "dense_layers": dense,
        "num_experts": experts,
        "moe_top_k": top_k,
        "moe_ffn_hidden_size": ffn,
        "moe_shared_ffn_hidden_size": ffn * count(raw, "n_shared_experts"),
        "moe_sigmoid": True,
        "moe_groups": groups,
        "moe_top_groups": top_groups,
        "moe_scaling": number(raw, "routed_scaling_factor"),
    }


def require_unbiased_output(raw: dict[str, Any]) -> None:
    """Reject ``attention_bias`` of a family in which it also gives the output projection a bias."""
    if flag(raw, "attention_bias"):
        raise UnsupportedError("its attention's output projection has a bias (attention_bias=true)")


# Other spellings, from GPT-2's descendants and mixtures of experts; the first one present counts.
_SPELLINGS = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "hidden_size": ("n_embd", "d_model"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads", "attention_heads"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size"),
    "max_position_embeddings": ("n_positions", "max_seq_len"),
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
    "num_experts_per_tok": ("num_experts_per_token", "moe_k", "moe_topk", "moe_top_k", "top_k_experts"),
}


def any_model(raw: dict[str, Any]) -> dict[str, Any]:
    """Read the sizes that every decoder's configuration has, whatever its layers are."""
    given = dict(raw)
    for name, others in _SPELLINGS.items():
        given[name] = next((raw[each] for each in (name, *others) if raw.get(each) is not None), None)
    shape = _shape(given, feed_forward=4)
    experts = count(given, "num_experts", 0, least=0)
    return {
        **shape,
        # transformers leaves this default out of the file.
        "tied_embeddings": flag(raw, "tie_word_embeddings", default=True),
        "num_experts": experts,
        "moe_top_k": count(given, "num_experts_per_tok", 1) if experts else 0,
        "moe_ffn_hidden_size": count(given, "moe_intermediate_size", shape["ffn_hidden_size"]) if experts else 0,
    }


def windows(raw: dict[str, Any], kinds: Sequence[str] = ()) -> tuple[int | None, ...]:
    """Read the sliding window of every layer; empty if there is none. ``kinds``: layers' kinds if the file has none."""
    if raw.get("sliding_window") is None or raw.get("use_sliding_window") is False:
        return ()
    window, found = count(raw, "sliding_window"), raw.get("layer_types") or kinds
    if not found:
        return (window,) * count(raw, "num_hidden_layers")
    return tuple(window if kind == "sliding_attention" else None for kind in found)


def chunk(raw: dict[str, Any]) -> int | None:
    """Return the tokens of a chunk beyond which layers don't attend, or ``None``."""
    return None if raw.get("attention_chunk_size") is None else count(raw, "attention_chunk_size")


def eos_ids(raw: dict[str, Any], directory: Path, vocab_size: int) -> tuple[int, ...]:
    """Read the tokens that end a response; ``generation_config.json`` takes precedence if it names any."""
    ids = _eos_ids(raw, "", vocab_size)
    generation = directory / "generation_config.json"
    if generation.is_file():
        written = read_object(generation)
        if "eos_token_id" in written:
            ids = _eos_ids(written, f" in {generation.name}", vocab_size)
    return ids


def _eos_ids(raw: dict[str, Any], where: str, vocab_size: int) -> tuple[int, ...]:
    given = raw.get("eos_token_id")
    ids = given if isinstance(given, list) else [] if given is None else [given]
    if any(isinstance(token, bool) or not isinstance(token, int) for token in ids):
        raise ValueError(f"eos_token_id={given!r}{where} must be a token id or a list of token ids")
    unknown = [token for token in ids if not 0 <= token < vocab_size]
    if unknown:
        raise ValueError(
            f"eos_token_id={given!r}{where}: {unknown[0]} is not a token id of the model, which has ids 0 to "
            f"{vocab_size - 1}"
        )
    return tuple(ids)


def count(raw: dict[str, Any], key: str, default: int | None = None, least: int = 1) -> int:
    """Read a whole number. Raises ``KeyError`` if it is missing, and ``ValueError`` for any other value."""
    value = default if raw.get(key) is None else raw[key]
    if value is None:
        raise KeyError(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{key}={value!r} must be an integer of at least {least}")
    return value


def number(raw: dict[str, Any], key: str) -> float:
    """Read a finite number above 0; raises like ``count``."""
    value = raw.get(key)
    if value is None:
        raise KeyError(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{key}={value!r} must be a number above 0")
    return float(value)


def flag(raw: dict[str, Any], key: str, default: bool = False) -> bool:
    value = raw.get(key, default)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{key}={value!r} must be true or false")
    return bool(value)
