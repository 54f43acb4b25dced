"""A model's dimensions, read from the checkpoint's own ``config.json`` and typed nowhere else. Imports no torch."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_like.errors import ConfigError

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "DeepseekV3ForCausalLM": "deepseek_v3",
}


OTHER = "other"
"""The family of a causal language model that transformers knows, and this project's own formulas do not."""

EMBEDDING = "model.embed_tokens.weight"
"""Name of the input embedding in the known families, and in most others."""

HEADS = ("lm_head.weight", "embed_out.weight")
"""Names of output projections; a tied one may be stored all the same."""

_CAUSAL = ("ForCausalLM", "LMHeadModel")


class _UnsupportedError(Exception):
    """A feature outside this project's own formulas; the rest of a sentence about ``config.json``."""


_MISTRAL_WINDOW = 4096  # of a config.json that says nothing, as in transformers; null means none
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Sizes of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    Attributes:
        query_rank: of the compressed query; ``None`` where queries are projected at once.
        kv_rank: of what the keys and values of all heads are made from.
        nope_dim, rope_dim: a query or key head's parts without and with rotary embedding; all heads share the latter
            part of the key.
        value_dim: of a value head.
        interleaved: rotary embedding turns neighbouring elements, not those half a head apart.
    """

    query_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    interleaved: bool = True


@dataclass(frozen=True, slots=True)
class ModelDimensions:
    """Sizes of a causal language model, in Hugging Face's terms.

    Attributes:
        family: one of ``FAMILIES``' values, or ``OTHER``.
        rope_scaling: the checkpoint's own scaling parameters (with their "rope_type"), or ``None``.
        qkv_bias: query, key and value projections have biases (the output projection never has one here).
        qk_norm: queries and keys pass a per-head RMSNorm.
        eos_token_ids: from ``generation_config.json`` where present, else from ``config.json``.
        num_experts: 0 for dense models; the ``moe_*`` fields are meaningful only above 0.
        latent: sizes of latent attention, where the model has it. ``head_dim`` is then that of queries and keys.
        dense_layers: the first layers, which have no experts though the others do.
        moe_shared_ffn_hidden_size: of the experts that every token goes to, together.
        moe_sigmoid: a router's scores are sigmoids, and a bias that is no parameter has a part in the choice alone
            (DeepSeek-V3, arXiv:2412.19437, section 2.1.2); else they are a softmax.
        moe_groups, moe_top_groups: experts are chosen from the best groups only.
        moe_scaling: factor of the chosen experts' weights.
        draft_layers: layers for multi-token prediction that may be stored behind the model's own, and are not read.
        foreign: why the model is of the family ``OTHER``: the beginning of a sentence; ``None`` for all others. Of such
            a model only sizes, lengths and token ids are known, numbers of parameters are estimated as if it were a
            Llama, and ``norm_eps`` and ``rope_theta`` are 0.
        attention_reach: keys that some layers' queries see at most, in tokens (sliding window, chunked attention);
            ``None`` where every one sees all before it.
        counted: parameters, and those of the matrix products that one token goes through, counted on the model itself
            (planning does so for foreign models).
    """

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    norm_eps: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None
    tied_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    eos_token_ids: tuple[int, ...]
    num_experts: int = 0
    moe_top_k: int = 0
    moe_ffn_hidden_size: int = 0
    moe_norm_topk_prob: bool = True
    latent: LatentAttention | None = None
    dense_layers: int = 0
    moe_shared_ffn_hidden_size: int = 0
    moe_sigmoid: bool = False
    moe_groups: int = 1
    moe_top_groups: int = 1
    moe_scaling: float = 1.0
    draft_layers: int = 0
    foreign: str | None = None
    attention_reach: int | None = None
    counted: tuple[int, int] | None = None

    @property
    def rotary_dim(self) -> int:
        """Elements of a query or key head that carry rotary embedding."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def value_dim(self) -> int:
        """Elements of a value head."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def expert_layers(self) -> range:
        """Numbers of the layers with experts."""
        return range(self.dense_layers, self.num_layers) if self.num_experts else range(0)

    @property
    def attention_parameters(self) -> int:
        """Elements of one layer's attention matrices."""
        if self.latent is None:
            return 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        own = self.latent
        direct = self.hidden_size if own.query_rank is None else own.query_rank
        query = self.num_heads * self.head_dim * direct + self.hidden_size * (own.query_rank or 0)
        keys = self.hidden_size * (own.kv_rank + own.rope_dim)
        keys += own.kv_rank * self.num_heads * (own.nope_dim + own.value_dim)
        return query + keys + self.num_heads * own.value_dim * self.hidden_size

    def mlp_parameters(self, experts: int) -> int:
        """Elements of all layers' feed-forward matrices, ``experts`` of each layer's experts and routers included."""
        of_experts = len(self.expert_layers)
        routed = 3 * experts * self.moe_ffn_hidden_size + 3 * self.moe_shared_ffn_hidden_size + self.num_experts
        dense = 3 * self.ffn_hidden_size
        return self.hidden_size * ((self.num_layers - of_experts) * dense + of_experts * routed)

    @property
    def active_parameters(self) -> int:
        """Parameters of the matrix products one token goes through: all layers, ``moe_top_k`` experts, the head."""
        if self.counted is not None:
            return self.counted[1]
        attention = self.num_layers * self.attention_parameters
        return attention + self.mlp_parameters(self.moe_top_k) + self.vocab_size * self.hidden_size

    def is_draft(self, name: str) -> bool:
        """Does the Hugging Face tensor belong to a layer for multi-token prediction?"""
        found = _LAYER.match(name)
        return found is not None and 0 <= int(found[1]) - self.num_layers < self.draft_layers

    def is_ignored(self, name: str) -> bool:
        """Is the Hugging Face tensor stored by some checkpoints without being a weight of the model's own?

        The copy of a tied embedding, rotary frequencies that follow from the configuration, layers for multi-token
        prediction.
        """
        tied_head = self.tied_embeddings and name in HEADS
        return tied_head or name.endswith("rotary_emb.inv_freq") or self.is_draft(name)

    @property
    def num_parameters(self) -> int:
        """All parameters, as a Hugging Face checkpoint has them; a tied embedding counts once."""
        if self.counted is not None:
            return self.counted[0]
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = self.attention_parameters + 2 * self.hidden_size
        layer += (queries + 2 * keys) * self.qkv_bias + 2 * self.head_dim * self.qk_norm
        if self.latent is not None:  # norms of what is compressed
            layer += self.latent.kv_rank + (self.latent.query_rank or 0)
        routing_biases = len(self.expert_layers) * self.num_experts * self.moe_sigmoid
        outer = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2) + self.hidden_size
        return self.num_layers * layer + self.mlp_parameters(self.num_experts) + routing_biases + outer

    @classmethod
    def from_checkpoint(cls, directory: Path) -> ModelDimensions:
        """Read ``config.json`` (and ``generation_config.json``) of a Hugging Face checkpoint.

        Raises:
            ConfigError: file missing, not JSON, no causal language model, sizes that are missing or wrong.
        """
        path = Path(directory) / "config.json"
        if not path.is_file():
            raise ConfigError(
                [f"model.path={directory}: no config.json there; give a Hugging Face checkpoint directory"]
            )
        return cls._from_raw(_read_object(path), path)

    @classmethod
    def _from_raw(cls, raw: dict[str, Any], path: Path) -> ModelDimensions:
        architectures = raw.get("architectures") or ["(none)"]
        architecture = architectures[0] if isinstance(architectures, list) else architectures
        if not isinstance(architecture, str) or not architecture.endswith(_CAUSAL):
            raise ConfigError(
                [
                    f"{path}: architecture {architecture} is no causal language model; use {', '.join(FAMILIES)}, or "
                    "with trainer.backend=fsdp another ...ForCausalLM"
                ]
            )
        try:
            try:
                return cls._of_known(raw, path, architecture)
            except _UnsupportedError as reason:
                foreign = f"{path}: {reason}"
            return cls._of_another(raw, path, foreign)
        except KeyError as error:
            raise ConfigError(
                [f"{path}: key {error} is missing; re-export the checkpoint with transformers"]
            ) from error
        except ValueError as error:
            raise ConfigError([f"{path}: {error}; re-export the checkpoint with transformers"]) from error

    @classmethod
    def _of_another(cls, raw: dict[str, Any], path: Path, foreign: str) -> ModelDimensions:
        """Of a family that transformers alone knows."""
        try:
            sizes = _any_model(raw)
        except KeyError as error:
            raise ConfigError(
                [
                    f"{path}: model_type {raw.get('model_type', '(none)')} gives no {error}, by this name or another "
                    "that is known; trainer.backend=fsdp trains decoders with attention and a largest number of "
                    "positions (if the key was lost, re-export the checkpoint with transformers)"
                ]
            ) from error
        return cls(family=OTHER, foreign=foreign, eos_token_ids=_eos_ids(raw, path.parent), **sizes)

    @classmethod
    def _of_known(cls, raw: dict[str, Any], path: Path, architecture: str) -> ModelDimensions:
        """Of a family whose every feature is known. Raises ``_UnsupportedError`` for all others."""
        family = FAMILIES.get(architecture)
        if family is None:
            raise _UnsupportedError(f"architecture {architecture} is none of {', '.join(FAMILIES)}")
        if raw.get("hidden_act", "silu") != "silu":
            raise _UnsupportedError(f"hidden_act={raw['hidden_act']} is not silu (SwiGLU)")
        if raw.get("use_sliding_window") or (family == "mistral" and raw.get("sliding_window", _MISTRAL_WINDOW)):
            raise _UnsupportedError("it has sliding-window attention")
        sparse = (raw.get("decoder_sparse_step", 1), raw.get("moe_layer_freq", 1))
        if raw.get("mlp_only_layers") or sparse != (1, 1):
            raise _UnsupportedError("layers without experts lie between layers with them")
        own = _latent_features(raw) if family == "deepseek_v3" else _features(raw, family)
        fields = {**_sizes(raw), **_rope(raw), **own}
        return cls(family=family, eos_token_ids=_eos_ids(raw, path.parent), **fields)


def keeps_type(name: str) -> bool:
    """Does the Hugging Face tensor keep its type on disk whatever the others are cast to?

    Routers' biases do: rounded, they would choose other experts.
    """
    return name.endswith(".e_score_correction_bias")


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError([f"{path}: not valid JSON ({error}); re-download or re-export the checkpoint"]) from error
    if not isinstance(raw, dict):
        raise ConfigError([f"{path}: holds no JSON object; re-download or re-export the checkpoint"])
    return raw


def _sizes(raw: dict[str, Any]) -> dict[str, Any]:
    heads, hidden, layers = (_count(raw, key) for key in ("num_attention_heads", "hidden_size", "num_hidden_layers"))
    kinds = raw.get("layer_types")
    if isinstance(kinds, list) and len(kinds) != layers:
        raise ValueError(f"num_hidden_layers={layers}, but layer_types has {len(kinds)} entries")
    if raw.get("head_dim") is None and raw.get("kv_lora_rank") is None and hidden % heads:
        raise ValueError(f"num_attention_heads={heads} does not divide hidden_size={hidden}, and there is no head_dim")
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": _count(raw, "num_key_value_heads", heads),
        "head_dim": _count(raw, "head_dim", hidden // heads),
        "ffn_hidden_size": _count(raw, "intermediate_size"),
        "vocab_size": _count(raw, "vocab_size"),
        "max_position_embeddings": _count(raw, "max_position_embeddings"),
        "norm_eps": _number(raw, "rms_norm_eps"),
        "tied_embeddings": _flag(raw, "tie_word_embeddings"),
    }


_SCALINGS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
"""Scalings of rotary embedding that are computed here, and what they cannot do without."""

_BIASED_OUTPUT = ("llama", "qwen3", "qwen3_moe")
"""Families whose ``attention_bias`` gives the output projection a bias, too."""


def _rope(raw: dict[str, Any]) -> dict[str, Any]:
    """Both spellings: ``rope_theta`` with ``rope_scaling``, and transformers 5's ``rope_parameters``."""
    key = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    given = raw.get(key) or {}
    if not isinstance(given, dict):
        raise ValueError(f"{key}={given!r} is no object")
    parameters = dict(given)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    theta = _number({"rope_theta": parameters.pop("rope_theta", None) or raw.get("rope_theta")}, "rope_theta")
    if not isinstance(kind, str) or kind not in _SCALINGS:
        raise _UnsupportedError(f"rope scaling {kind!r} is none of {', '.join(_SCALINGS)}")
    for name in _SCALINGS[kind]:
        _number(parameters, name)
    return {"rope_theta": theta, "rope_scaling": None if kind == "default" else parameters}


def _features(raw: dict[str, Any], family: str) -> dict[str, Any]:
    if family in _BIASED_OUTPUT and _flag(raw, "attention_bias"):
        raise _UnsupportedError("its attention's output projection has a bias (attention_bias=true)")
    if family == "llama" and _flag(raw, "mlp_bias"):
        raise _UnsupportedError("its MLPs have biases (mlp_bias=true)")
    features: dict[str, Any] = {
        "qkv_bias": family == "qwen2" or _flag(raw, "attention_bias"),
        "qk_norm": family in ("qwen3", "qwen3_moe"),
    }
    if family == "qwen3_moe":
        features |= {
            # transformers 5 writes num_local_experts, earlier ones num_experts.
            "num_experts": _count(raw, "num_local_experts" if raw.get("num_local_experts") else "num_experts"),
            "moe_top_k": _count(raw, "num_experts_per_tok"),
            "moe_ffn_hidden_size": _count(raw, "moe_intermediate_size"),
            "moe_norm_topk_prob": _flag(raw, "norm_topk_prob"),
        }
    return features


def _latent_features(raw: dict[str, Any]) -> dict[str, Any]:
    """DeepSeek-V3's: latent attention, leading dense layers, shared experts, sigmoid routers that choose by groups."""
    layers, experts, top_k = (
        _count(raw, key) for key in ("num_hidden_layers", "n_routed_experts", "num_experts_per_tok")
    )
    groups, top_groups = _count(raw, "n_group"), _count(raw, "topk_group")
    dense = _whole(raw, "first_k_dense_replace")
    for key, only in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("norm_topk_prob", True)):
        if raw.get(key, only) != only:
            raise _UnsupportedError(f"{key}={raw[key]} is not {only}")
    if _flag(raw, "attention_bias"):
        raise _UnsupportedError("its latent attention has biases (attention_bias=true)")
    if dense >= layers:
        raise _UnsupportedError(f"first_k_dense_replace={dense} leaves no layer of {layers} with experts")
    if top_k < 2 or (groups > 1 and top_k // top_groups != 2):
        raise _UnsupportedError(
            f"num_experts_per_tok={top_k} of topk_group={top_groups} groups: groups are ranked by their best two "
            "experts, as in DeepSeek-V3, which Megatron does where twice as many experts are chosen"
        )
    if experts % groups:
        raise ValueError(f"n_group={groups} does not divide n_routed_experts={experts}")
    latent = LatentAttention(
        query_rank=None if raw.get("q_lora_rank") is None else _count(raw, "q_lora_rank"),
        kv_rank=_count(raw, "kv_lora_rank"),
        nope_dim=_count(raw, "qk_nope_head_dim"),
        rope_dim=_count(raw, "qk_rope_head_dim"),
        value_dim=_count(raw, "v_head_dim"),
        interleaved=_flag({"rope_interleave": True, **raw}, "rope_interleave"),
    )
    ffn = _count(raw, "moe_intermediate_size")
    return {
        "qkv_bias": False,
        "qk_norm": False,
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
        "draft_layers": _whole({"num_nextn_predict_layers": 0, **raw}, "num_nextn_predict_layers"),
    }


# Other spellings of GPT-2's descendants and of mixtures of experts; the first one that is given counts.
_SPELLINGS = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "hidden_size": ("n_embd", "d_model"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads", "attention_heads"),
    "intermediate_size": ("n_inner", "ffn_dim", "ffn_hidden_size"),
    "max_position_embeddings": ("n_positions", "max_seq_len"),
    "num_experts": ("num_local_experts", "n_routed_experts", "moe_num_experts"),
}


def _any_model(raw: dict[str, Any]) -> dict[str, Any]:
    """Sizes that every decoder's configuration has, whatever its layers are."""
    given = dict(raw)
    for name, others in _SPELLINGS.items():
        spelled = [other for other in others if raw.get(other) is not None]
        if given.get(name) is None and spelled:
            given[name] = raw[spelled[0]]
    hidden, heads = _count(given, "hidden_size"), _count(given, "num_attention_heads")
    ffn = _count(given, "intermediate_size", 4 * hidden)
    experts = _whole({"num_experts": 0, **given}, "num_experts")
    return {
        "num_layers": _count(given, "num_hidden_layers"),
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": _count(given, "num_key_value_heads", heads),
        "head_dim": _count(given, "head_dim", max(1, hidden // heads)),
        "ffn_hidden_size": ffn,
        "vocab_size": _count(given, "vocab_size"),
        "max_position_embeddings": _count(given, "max_position_embeddings"),
        "norm_eps": 0.0,
        "rope_theta": 0.0,
        "rope_scaling": None,
        # transformers' own default, which it leaves out of the file.
        "tied_embeddings": _flag({"tie_word_embeddings": True, **raw}, "tie_word_embeddings"),
        "qkv_bias": False,
        "qk_norm": False,
        "num_experts": experts,
        "moe_top_k": _count(given, "num_experts_per_tok", 1) if experts else 0,
        "moe_ffn_hidden_size": _count(given, "moe_intermediate_size", ffn) if experts else 0,
        "attention_reach": _attention_reach(raw),
        "draft_layers": _whole({"num_nextn_predict_layers": 0, **raw}, "num_nextn_predict_layers"),
    }


def _attention_reach(raw: dict[str, Any]) -> int | None:
    """The narrowest window or chunk of any layer, where one is used."""
    kinds = raw.get("layer_types")
    slides = "sliding_attention" in kinds if isinstance(kinds, list) else raw.get("use_sliding_window") is not False
    reaches = [_count(raw, "sliding_window")] if slides and raw.get("sliding_window") is not None else []
    if raw.get("attention_chunk_size") is not None:
        reaches.append(_count(raw, "attention_chunk_size"))
    return min(reaches, default=None)


def _eos_ids(raw: dict[str, Any], directory: Path) -> tuple[int, ...]:
    generation, where = directory / "generation_config.json", ""
    eos = raw.get("eos_token_id")
    if generation.is_file():
        written = _read_object(generation)
        if "eos_token_id" in written:
            eos, where = written["eos_token_id"], f" in {generation.name} beside it"
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if any(isinstance(token, bool) or not isinstance(token, int) for token in ids):
        raise ValueError(f"eos_token_id={eos!r}{where} is neither a token id nor a list of them")
    return tuple(ids)


def _count(raw: dict[str, Any], key: str, default: int | None = None) -> int:
    """A whole number of at least 1. Raises ``KeyError`` without one, and ``ValueError`` for what else stands there."""
    value = raw.get(key)
    if value is None and default is not None:
        return default
    if value is None:
        raise KeyError(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{key}={value!r} is no whole number of at least 1")
    return value


def _whole(raw: dict[str, Any], key: str) -> int:
    """A whole number of at least 0; raises as ``_count``."""
    return 0 if raw.get(key) == 0 else _count(raw, key)


def _number(raw: dict[str, Any], key: str) -> float:
    """A finite number above 0; raises as ``_count``."""
    value = raw.get(key)
    if value is None:
        raise KeyError(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{key}={value!r} is no number above 0")
    return float(value)


def _flag(raw: dict[str, Any], key: str) -> bool:
    """A switch that is off unless it is given."""
    value = raw.get(key)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{key}={value!r} is neither true nor false")
    return bool(value)
