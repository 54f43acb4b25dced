"""A model's dimensions, read from the checkpoint's own ``config.json`` and typed nowhere else. Imports no torch."""

from __future__ import annotations

import json
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
}


@dataclass(frozen=True, slots=True)
class ModelDimensions:
    """Sizes of a causal language model, in Hugging Face's terms.

    Attributes:
        family: one of ``FAMILIES``' values.
        rope_scaling: the checkpoint's own scaling parameters (with their "rope_type"), or ``None``.
        qkv_bias: query, key and value projections have biases (the output projection never has one here).
        qk_norm: queries and keys pass a per-head RMSNorm.
        num_experts: 0 for dense models; the ``moe_*`` fields are meaningful only above 0.
        eos_token_ids: from ``generation_config.json`` where present, else from ``config.json``.
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
    moe_aux_loss_coef: float = 0.0
    moe_norm_topk_prob: bool = True

    @classmethod
    def from_checkpoint(cls, directory: Path) -> ModelDimensions:
        """Read ``config.json`` (and ``generation_config.json``) of a Hugging Face checkpoint.

        Raises:
            ConfigError: file missing, not JSON, an unknown architecture, or a feature this system does not compute.
        """
        path = Path(directory) / "config.json"
        if not path.is_file():
            raise ConfigError(
                [f"model.path={directory}: no config.json there; give a Hugging Face checkpoint directory"]
            )
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ConfigError([f"{path}: not valid JSON ({error}); re-download or re-export the checkpoint"]) from error
        if not isinstance(raw, dict):
            raise ConfigError([f"{path}: holds no JSON object; re-download or re-export the checkpoint"])
        return cls._from_raw(raw, path)

    @classmethod
    def _from_raw(cls, raw: dict[str, Any], path: Path) -> ModelDimensions:
        architecture = (raw.get("architectures") or ["(none)"])[0]
        family = FAMILIES.get(architecture)
        if family is None:
            raise ConfigError([f"{path}: architecture {architecture} is not supported; known: {', '.join(FAMILIES)}"])
        if raw.get("hidden_act", "silu") != "silu":
            raise ConfigError(
                [f"{path}: hidden_act={raw['hidden_act']} is not supported; only silu (SwiGLU) models are"]
            )
        if raw.get("use_sliding_window") or (family == "mistral" and raw.get("sliding_window")):
            raise ConfigError([f"{path}: sliding-window attention is not supported; use a checkpoint without it"])
        if raw.get("mlp_only_layers") or raw.get("decoder_sparse_step", 1) != 1:
            raise ConfigError(
                [f"{path}: layers without experts between layers with them are not supported; use another checkpoint"]
            )
        try:
            return cls(
                family=family,
                eos_token_ids=_eos_ids(raw, path.parent),
                **_sizes(raw),
                **_rope(raw),
                **_features(raw, family),
            )
        except KeyError as error:
            raise ConfigError(
                [f"{path}: key {error} is missing; re-export the checkpoint with transformers"]
            ) from error
        except (TypeError, ValueError, ZeroDivisionError) as error:
            raise ConfigError(
                [f"{path}: a value is unusable ({error}); re-export the checkpoint with transformers"]
            ) from error


def _sizes(raw: dict[str, Any]) -> dict[str, Any]:
    heads = raw["num_attention_heads"]
    return {
        "num_layers": raw["num_hidden_layers"],
        "hidden_size": raw["hidden_size"],
        "num_heads": heads,
        "num_kv_heads": raw.get("num_key_value_heads") or heads,
        "head_dim": raw.get("head_dim") or raw["hidden_size"] // heads,
        "ffn_hidden_size": raw["intermediate_size"],
        "vocab_size": raw["vocab_size"],
        "max_position_embeddings": raw["max_position_embeddings"],
        "norm_eps": raw["rms_norm_eps"],
        "tied_embeddings": bool(raw.get("tie_word_embeddings", False)),
    }


def _rope(raw: dict[str, Any]) -> dict[str, Any]:
    """Both spellings: ``rope_theta`` with ``rope_scaling``, and transformers 5's ``rope_parameters``."""
    parameters = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    theta = parameters.pop("rope_theta", None) or raw.get("rope_theta")
    if theta is None:
        raise KeyError("rope_theta")
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    return {"rope_theta": float(theta), "rope_scaling": None if kind == "default" else parameters}


def _features(raw: dict[str, Any], family: str) -> dict[str, Any]:
    features: dict[str, Any] = {
        "qkv_bias": family == "qwen2" or bool(raw.get("attention_bias", False)),
        "qk_norm": family in ("qwen3", "qwen3_moe"),
    }
    if family == "qwen3_moe":
        features |= {
            # transformers 5 writes num_local_experts, earlier ones num_experts.
            "num_experts": raw.get("num_local_experts") or raw["num_experts"],
            "moe_top_k": raw["num_experts_per_tok"],
            "moe_ffn_hidden_size": raw["moe_intermediate_size"],
            "moe_aux_loss_coef": raw.get("router_aux_loss_coef", 0.001),
            "moe_norm_topk_prob": bool(raw.get("norm_topk_prob", False)),
        }
    return features


def _eos_ids(raw: dict[str, Any], directory: Path) -> tuple[int, ...]:
    generation = directory / "generation_config.json"
    eos = raw.get("eos_token_id")
    if generation.is_file():
        eos = json.loads(generation.read_text(encoding="utf-8")).get("eos_token_id", eos)
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (int(eos),)
