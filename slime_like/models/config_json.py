"""Read a checkpoint's ``config.json`` into the names of ``ModelDimensions``.

Every reader raises ``KeyError`` for a missing key, ``ValueError`` for a value of the wrong kind, and
``UnsupportedError`` for a feature outside this project's formulas.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_like.errors import ConfigError

MISTRAL_WINDOW = 4096  # default if config.json has none, as in transformers; null means no window


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


def sizes(raw: dict[str, Any]) -> dict[str, Any]:
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
    return {
        **shape,
        "norm_eps": _number(raw, "rms_norm_eps"),
        "tied_embeddings": _flag(raw, "tie_word_embeddings"),
    }


def _shape(raw: dict[str, Any], feed_forward: int | None = None) -> dict[str, int]:
    """Read the sizes that every decoder has. An MLP without a size is ``feed_forward`` times the hidden size."""
    hidden, heads, layers = (_count(raw, key) for key in ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": _count(raw, "num_key_value_heads", heads),
        "head_dim": _count(raw, "head_dim", max(1, hidden // heads)),
        "ffn_hidden_size": _count(raw, "intermediate_size", None if feed_forward is None else feed_forward * hidden),
        "vocab_size": _count(raw, "vocab_size"),
        "max_position_embeddings": _count(raw, "max_position_embeddings"),
    }


_CONTEXT, _ORIGINAL = "max_position_embeddings", "original_max_position_embeddings"
_SCALINGS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "yarn": ("factor", _ORIGINAL),
}
"""Supported scalings of rotary embedding, and the parameters each one requires."""

_BIASED_OUTPUT = ("llama", "qwen3", "qwen3_moe")
"""Families whose ``attention_bias`` also gives the output projection a bias."""


def rope(raw: dict[str, Any]) -> dict[str, Any]:
    """Read either spelling: ``rope_theta`` with ``rope_scaling``, or transformers 5's ``rope_parameters``.

    What is absent has transformers' value: a base of 10,000, and ``max_position_embeddings`` as the original length.
    Engines serve a linear scaling's factor times ``max_position_embeddings``; for YaRN, this number as it is.
    """
    readings = [_rope(raw, key) for key in ("rope_parameters", "rope_scaling") if raw.get(key)] or [_rope(raw, "")]
    if readings[0] != readings[-1]:
        # transformers then reads rope_scaling, and loses the rope_theta in rope_parameters
        raise ValueError("rope_parameters and rope_scaling contradict each other; keep one, with its rope_theta")
    scaling = readings[0]["rope_scaling"]
    if scaling is not None and scaling["rope_type"] == "linear":
        return readings[0] | {"max_position_embeddings": int(_count(raw, _CONTEXT) * scaling["factor"])}
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
        parameters[_ORIGINAL] = raw.get(_ORIGINAL) or parameters.get(_ORIGINAL) or _count(raw, _CONTEXT)
    for name in _SCALINGS[kind]:
        _number(parameters, name)
    return {
        "rope_theta": _number({"rope_theta": theta}, "rope_theta"),
        "rope_scaling": None if kind == "default" else parameters,
    }


def features(raw: dict[str, Any], family: str) -> dict[str, Any]:
    """Read biases, norms and experts of a family with grouped-query attention."""
    if family in _BIASED_OUTPUT and _flag(raw, "attention_bias"):
        raise UnsupportedError("its attention's output projection has a bias (attention_bias=true)")
    if family == "llama" and _flag(raw, "mlp_bias"):
        raise UnsupportedError("its MLPs have biases (mlp_bias=true)")
    found: dict[str, Any] = {
        "qkv_bias": family == "qwen2" or _flag(raw, "attention_bias"),
        "qk_norm": family in ("qwen3", "qwen3_moe"),
    }
    if family == "qwen3_moe":
        found |= {
            # transformers 5 writes num_local_experts, earlier ones num_experts.
            "num_experts": _count(raw, "num_local_experts" if raw.get("num_local_experts") else "num_experts"),
            "moe_top_k": _count(raw, "num_experts_per_tok"),
            "moe_ffn_hidden_size": _count(raw, "moe_intermediate_size"),
            "moe_norm_topk_prob": _flag(raw, "norm_topk_prob"),
        }
        chosen, experts = found["moe_top_k"], found["num_experts"]
        if chosen > experts:
            raise ValueError(f"num_experts_per_tok={chosen} is more than its {experts} experts")
    return found


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Sizes of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    Attributes:
        query_rank: rank of the compressed query; ``None`` if queries are projected directly.
        kv_rank: rank of the compressed keys and values, shared by all heads.
        nope_dim, rope_dim: parts of a query or key head without and with rotary embedding; all heads share the key's
        rotary part.
        value_dim: size of a value head.
        interleaved: rotary embedding rotates adjacent elements instead of elements half a head apart.
    """

    query_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    interleaved: bool = True


def latent_features(raw: dict[str, Any]) -> dict[str, Any]:
    """Read DeepSeek-V3's latent attention, leading dense layers, shared experts, and group-limited sigmoid routers."""
    layers, experts, top_k = (
        _count(raw, key) for key in ("num_hidden_layers", "n_routed_experts", "num_experts_per_tok")
    )
    groups, top_groups = _count(raw, "n_group"), _count(raw, "topk_group")
    dense = _count(raw, "first_k_dense_replace", least=0)
    for key, only in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("norm_topk_prob", True)):
        if raw.get(key, only) != only:
            raise UnsupportedError(f"{key}={raw[key]} is not {only}")
    if _flag(raw, "attention_bias"):
        raise UnsupportedError("its latent attention has biases (attention_bias=true)")
    if dense >= layers:
        raise UnsupportedError(f"first_k_dense_replace={dense} leaves no layer of {layers} with experts")
    if top_k < 2 or (groups > 1 and top_k // top_groups != 2):
        raise UnsupportedError(
            f"num_experts_per_tok={top_k} is not two experts for each of topk_group={top_groups} groups, which "
            "Megatron needs to rank groups by their best two experts, like DeepSeek-V3"
        )
    if experts % groups:
        raise ValueError(f"n_group={groups} does not divide n_routed_experts={experts}")
    latent = LatentAttention(
        query_rank=None if raw.get("q_lora_rank") is None else _count(raw, "q_lora_rank"),
        kv_rank=_count(raw, "kv_lora_rank"),
        nope_dim=_count(raw, "qk_nope_head_dim"),
        rope_dim=_count(raw, "qk_rope_head_dim"),
        value_dim=_count(raw, "v_head_dim"),
        interleaved=_flag(raw, "rope_interleave", default=True),
    )
    ffn = _count(raw, "moe_intermediate_size")
    return {
        "latent": latent,
        "head_dim": latent.nope_dim + latent.rope_dim,
        "num_kv_heads": _count(raw, "num_attention_heads"),
        "dense_layers": dense,
        "num_experts": experts,
        "moe_top_k": top_k,
        "moe_ffn_hidden_size": ffn,
        "moe_shared_ffn_hidden_size": ffn * _count(raw, "n_shared_experts"),
        "moe_sigmoid": True,
        "moe_groups": groups,
        "moe_top_groups": top_groups,
        "moe_scaling": _number(raw, "routed_scaling_factor"),
        "draft_layers": _count(raw, "num_nextn_predict_layers", 0, least=0),
    }


# Other spellings, from GPT-2's descendants and mixtures of experts; the first one present counts.
_SPELLINGS = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "hidden_size": ("n_embd", "d_model"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads", "attention_heads"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size"),
    "max_position_embeddings": ("n_positions", "max_seq_len"),
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
}


def any_model(raw: dict[str, Any]) -> dict[str, Any]:
    """Read the sizes that every decoder's configuration has, whatever its layers are."""
    given = dict(raw)
    for name, others in _SPELLINGS.items():
        given[name] = next((raw[each] for each in (name, *others) if raw.get(each) is not None), None)
    shape = _shape(given, feed_forward=4)
    experts = _count(given, "num_experts", 0, least=0)
    return {
        **shape,
        # transformers leaves this default out of the file.
        "tied_embeddings": _flag(raw, "tie_word_embeddings", default=True),
        "num_experts": experts,
        "moe_top_k": _count(given, "num_experts_per_tok", 1) if experts else 0,
        "moe_ffn_hidden_size": _count(given, "moe_intermediate_size", shape["ffn_hidden_size"]) if experts else 0,
        "attention_reach": _attention_reach(raw),
        "draft_layers": _count(raw, "num_nextn_predict_layers", 0, least=0),
    }


def _attention_reach(raw: dict[str, Any]) -> int | None:
    """Return the narrowest window or chunk of any layer, or ``None`` if no layer uses one."""
    kinds = raw.get("layer_types")
    slides = "sliding_attention" in kinds if isinstance(kinds, list) else raw.get("use_sliding_window") is not False
    keys = ("sliding_window", "attention_chunk_size") if slides else ("attention_chunk_size",)
    return min((_count(raw, key) for key in keys if raw.get(key) is not None), default=None)


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


def _count(raw: dict[str, Any], key: str, default: int | None = None, least: int = 1) -> int:
    """Read a whole number. Raises ``KeyError`` if it is missing, and ``ValueError`` for any other value."""
    value = default if raw.get(key) is None else raw[key]
    if value is None:
        raise KeyError(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{key}={value!r} must be an integer of at least {least}")
    return value


def _number(raw: dict[str, Any], key: str) -> float:
    """Read a finite number above 0; raises like ``_count``."""
    value = raw.get(key)
    if value is None:
        raise KeyError(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{key}={value!r} must be a number above 0")
    return float(value)


def _flag(raw: dict[str, Any], key: str, default: bool = False) -> bool:
    value = raw.get(key, default)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{key}={value!r} must be true or false")
    return bool(value)
