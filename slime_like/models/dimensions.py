"""A model's dimensions, read from the checkpoint's ``config.json`` and stated nowhere else. Doesn't import torch."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from slime_like.errors import ConfigError
from slime_like.models import config_json
from slime_like.models.converted import training_checkpoint
from slime_like.system.words import from_here

FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "DeepseekV3ForCausalLM": "deepseek_v3",
}

OTHER = "other"
"""The family of causal language models that transformers supports, but this project's formulas do not."""

EMBEDDING = "model.embed_tokens.weight"
"""Name of the input embedding in the known families, and in most others."""

HEADS = ("lm_head.weight", "embed_out.weight")
"""Names of output projections. A tied one may be stored anyway."""

_CAUSAL = ("ForCausalLM", "LMHeadModel")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDimensions:
    """Sizes of a causal language model, in Hugging Face's terms.

    Attributes:
        family: one of ``FAMILIES``' values, or ``OTHER``.
        rope_scaling: the checkpoint's scaling parameters (with their "rope_type"), or ``None``.
        qkv_bias: query, key and value projections have biases (the output projection never has one here).
        qk_norm: queries and keys pass a per-head RMSNorm.
        eos_token_ids: from ``generation_config.json`` if present, else from ``config.json``.
        num_experts: 0 for dense models; the ``moe_*`` fields are meaningful only above 0.
        latent: sizes of latent attention, if the model has it. ``head_dim`` then applies to queries and keys only.
        dense_layers: number of leading layers without experts in a mixture of experts.
        moe_shared_ffn_hidden_size: total size of the experts that every token goes to.
        moe_sigmoid: a router's scores are sigmoids, and a bias that is not a parameter affects only the choice
            (DeepSeek-V3, arXiv:2412.19437, section 2.1.2); otherwise scores are a softmax.
        moe_groups, moe_top_groups: experts are chosen from the best groups only.
        moe_scaling: factor of the chosen experts' weights.
        draft_layers: layers for multi-token prediction that may be stored after the model's layers, and are not read.
        foreign: the reason why the family is ``OTHER``, as the beginning of a sentence; ``None`` for all others. Such a
            model has only sizes, lengths and token ids; parameters are estimated as for a Llama, and ``norm_eps`` and
            ``rope_theta`` are 0.
        attention_reach: the most keys that some layers' queries see, in tokens (sliding window, chunked attention);
            ``None`` if every query sees all earlier tokens.
        counted: parameters in total, and in the matrix products that one token goes through. Planning counts them on
            the model itself for foreign models.
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
    norm_eps: float = 0.0
    rope_theta: float = 0.0
    rope_scaling: dict[str, Any] | None = None
    tied_embeddings: bool
    qkv_bias: bool = False
    qk_norm: bool = False
    eos_token_ids: tuple[int, ...]
    num_experts: int = 0
    moe_top_k: int = 0
    moe_ffn_hidden_size: int = 0
    moe_norm_topk_prob: bool = True
    latent: config_json.LatentAttention | None = None
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
        """Number of elements with rotary embedding in a query or key head."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def value_dim(self) -> int:
        """Number of elements in a value head."""
        return self.head_dim if self.latent is None else self.latent.value_dim

    @property
    def expert_layers(self) -> range:
        """Indices of the layers with experts."""
        return range(self.dense_layers, self.num_layers) if self.num_experts else range(0)

    @property
    def attention_parameters(self) -> int:
        """Number of elements in one layer's attention matrices."""
        if self.latent is None:
            return 2 * self.hidden_size * self.head_dim * (self.num_heads + self.num_kv_heads)
        latent = self.latent
        direct = self.hidden_size if latent.query_rank is None else latent.query_rank
        query = self.num_heads * self.head_dim * direct + self.hidden_size * (latent.query_rank or 0)
        keys = self.hidden_size * (latent.kv_rank + latent.rope_dim)
        keys += latent.kv_rank * self.num_heads * (latent.nope_dim + latent.value_dim)
        return query + keys + self.num_heads * latent.value_dim * self.hidden_size

    def mlp_parameters(self, experts: int) -> int:
        """Return the elements of all layers' feed-forward matrices, with ``experts`` experts per layer and routers."""
        of_experts = len(self.expert_layers)
        routed = 3 * experts * self.moe_ffn_hidden_size + 3 * self.moe_shared_ffn_hidden_size + self.num_experts
        dense = 3 * self.ffn_hidden_size
        return self.hidden_size * ((self.num_layers - of_experts) * dense + of_experts * routed)

    @property
    def active_parameters(self) -> int:
        """Parameters in the matrix products of one token: all layers, ``moe_top_k`` experts, the head."""
        if self.counted is not None:
            return self.counted[1]
        attention = self.num_layers * self.attention_parameters
        return attention + self.mlp_parameters(self.moe_top_k) + self.vocab_size * self.hidden_size

    def is_draft(self, name: str) -> bool:
        """Return whether the Hugging Face tensor belongs to a layer for multi-token prediction."""
        found = _LAYER.match(name)
        return found is not None and 0 <= int(found[1]) - self.num_layers < self.draft_layers

    def is_ignored(self, name: str) -> bool:
        """Return whether some checkpoints store this Hugging Face tensor without it being a weight of this model."""
        tied_head = self.tied_embeddings and name in HEADS
        return tied_head or name.endswith("rotary_emb.inv_freq") or self.is_draft(name)

    @property
    def num_parameters(self) -> int:
        """Number of parameters in a Hugging Face checkpoint; a tied embedding counts once."""
        if self.counted is not None:
            return self.counted[0]
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        layer = self.attention_parameters + 2 * self.hidden_size
        layer += (queries + 2 * keys) * self.qkv_bias + 2 * self.head_dim * self.qk_norm
        if self.latent is not None:  # norms of the compressed parts
            layer += self.latent.kv_rank + (self.latent.query_rank or 0)
        routing_biases = len(self.expert_layers) * self.num_experts * self.moe_sigmoid
        outer = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2) + self.hidden_size
        return self.num_layers * layer + self.mlp_parameters(self.num_experts) + routing_biases + outer

    @classmethod
    def from_checkpoint(cls, directory: Path) -> Self:
        """Read ``config.json`` (and ``generation_config.json``) of a Hugging Face checkpoint.

        Raises:
            ConfigError: file missing, not JSON, not a causal language model, or sizes missing or wrong.
        """
        path = Path(directory) / "config.json"
        if not path.is_file():
            raise ConfigError(f"model.path={directory}{_what_instead(Path(directory))}")
        return cls._from_raw(config_json.read_object(path), path)

    @classmethod
    def _from_raw(cls, raw: dict[str, Any], path: Path) -> Self:
        architectures = raw.get("architectures") or ["(none)"]
        architecture = architectures[0] if isinstance(architectures, list) else architectures
        if not isinstance(architecture, str) or not architecture.endswith(_CAUSAL):
            remedy = f"use {', '.join(FAMILIES)}, or with trainer.backend=fsdp another ...ForCausalLM"
            raise ConfigError(f"{path}: architecture {architecture} is not a causal language model; {remedy}")
        try:
            try:
                fields = _of_known(raw, architecture)
            except config_json.UnsupportedError as reason:
                fields = {"family": OTHER, "foreign": f"{path}: {reason}", **_of_another(raw, path)}
            return cls(eos_token_ids=config_json.eos_ids(raw, path.parent, fields["vocab_size"]), **fields)
        except (KeyError, ValueError) as error:
            problem = f"key {error} is missing" if isinstance(error, KeyError) else str(error)
            raise ConfigError(f"{path}: {problem}; re-export the checkpoint with transformers") from error


def _of_another(raw: dict[str, Any], path: Path) -> dict[str, Any]:
    try:
        return config_json.any_model(raw)
    except KeyError as error:
        raise ConfigError(
            f"{path}: model_type {raw.get('model_type', '(none)')} has no {error}, under this or another known name; "
            "use a decoder with attention and a maximum number of positions, or, if the key was lost, re-export the "
            "checkpoint with transformers"
        ) from error


def _of_known(raw: dict[str, Any], architecture: str) -> dict[str, Any]:
    """Read a supported family. Raises ``config_json.UnsupportedError`` for all others."""
    family = FAMILIES.get(architecture)
    if family is None:
        raise config_json.UnsupportedError(f"architecture {architecture} is not one of {', '.join(FAMILIES)}")
    if raw.get("hidden_act", "silu") != "silu":
        raise config_json.UnsupportedError(f"hidden_act={raw['hidden_act']} is not silu (SwiGLU)")
    mistral_window = raw.get("sliding_window", config_json.MISTRAL_WINDOW) if family == "mistral" else None
    if raw.get("use_sliding_window") or mistral_window:
        raise config_json.UnsupportedError("it has sliding-window attention")
    sparse = (raw.get("decoder_sparse_step", 1), raw.get("moe_layer_freq", 1))
    if raw.get("mlp_only_layers") or sparse != (1, 1):
        raise config_json.UnsupportedError("it has layers without experts between layers with experts")
    features = config_json.latent_features(raw) if family == "deepseek_v3" else config_json.features(raw, family)
    return {"family": family, **config_json.sizes(raw), **config_json.rope(raw), **features}


def keeps_type(name: str) -> bool:
    """Return whether the Hugging Face tensor keeps its type on disk.

    Router biases do: rounding would change the chosen experts.
    """
    return name.endswith(".e_score_correction_bias")


def _what_instead(directory: Path) -> str:
    if not directory.exists():
        return f" does not exist{from_here(directory)}; give a Hugging Face checkpoint directory"
    checkpoint = training_checkpoint(directory)
    if checkpoint is None:
        return ": contains no config.json; give a Hugging Face checkpoint directory"
    return (
        f" is a training checkpoint; give the Hugging Face directory it was made from and model.weights={checkpoint}, "
        "or convert it with `slime-like convert to-hf`"
    )
