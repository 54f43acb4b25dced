"""A model's dimensions, read from the checkpoint's ``config.json`` and stated nowhere else. Doesn't import torch."""

from __future__ import annotations

import pkgutil
import re
from collections import UserDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from slime_like.errors import ConfigError
from slime_like.models import config_json
from slime_like.models.converted import what_instead
from slime_like.models.tower import language_settings

if TYPE_CHECKING:
    from slime_like.models.linear_attention import LinearAttention

OTHER = "other"
"""Family of the causal language models that transformers supports, but this project's formulas do not."""

EMBEDDING = "model.embed_tokens.weight"
"""Name of the input embedding in the known families, and in most others."""

HEADS = ("lm_head.weight", "embed_out.weight")
"""Names of output projections. A tied one may be stored anyway."""

VALUE_HEAD = "score.weight"
"""Name of a value model's head, as in transformers' models for classification."""

_CAUSAL = ("ForCausalLM", "LMHeadModel")
_CLASSIFIER = re.compile("(Text)?For(Sequence|Token)Classification$")  # Gemma3TextFor... of Gemma3ForCausalLM


@dataclass(frozen=True, slots=True)
class Family:
    """One model family: how its ``config.json`` is read, and where its layers are built.

    Attributes:
        name: transformers' model type.
        architecture: first entry of ``architectures`` in ``config.json``.
        read: returns fields of ``ModelDimensions`` for the content of ``config.json``; raises like ``config_json``.
        megatron: module and class of Megatron's settings, layers and conversion rules; empty if only FSDP trains it.
        small: sizes of attention in small models, as fields of transformers' configuration, if they are special.
        tiny: other fields in which a tiny model differs from other families'.
    """

    name: str
    architecture: str
    read: Callable[[dict[str, Any]], dict[str, Any]]
    megatron: str = "backends.megatron.families:MegatronFamily"
    small: Mapping[str, Any] = field(default_factory=dict)
    tiny: Mapping[str, Any] = field(default_factory=dict)


class Families(UserDict[str, Any]):
    """Families by name. One given as text, ``module:attribute``, is imported when it is first read."""

    def __getitem__(self, name: str) -> Family:
        if isinstance(found := self.data[name], str):
            found = self.data[name] = pkgutil.resolve_name(found)
        assert isinstance(found, Family)
        return found


FAMILIES = Families()
"""All families, from ``slime_like.models.families``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Grouped-query attention, and all that depends on the kind of a model's layers.

    A subclass describes another kind of layers and has the sizes that only this kind has. Counts are of all layers.

    Attributes:
        rotary_fraction: the leading part of a head that has rotary embedding.
        output_gate: outputs are multiplied by the sigmoid of a gate, whose rows follow each query head's.
        linear: sizes of the layers that have linear attention instead.
        windows: most keys that a query of each layer sees, including its own; ``None``: all keys. Empty: all layers.
        window_theta: base of the rotary embedding of layers with windows, which is not scaled; ``None``: the others'.
        scale: factor of the products of queries and keys; ``None``: ``head_dim ** -0.5``.
        sinks: every head has a score in its softmax that belongs to no value.
        output_bias: the output projection has a bias.
        reloads: a weight update replaces every tensor that an engine computes with.
    """

    rotary_fraction: float = 1.0
    output_gate: bool = False
    linear: LinearAttention | None = None
    windows: tuple[int | None, ...] = ()
    window_theta: float | None = None
    scale: float | None = None
    sinks: bool = False
    output_bias: bool = False
    reloads: ClassVar[bool] = True

    @property
    def special(self) -> str:
        """Name of layers that Transformer Engine does not support, and engines may fuse; empty for others."""
        if type(self) is not Attention:
            return type(self).__name__
        properties = {
            "output gates": self.output_gate,
            "partial rotary embedding": self.rotary_fraction < 1,
            "sliding windows": self.window is not None,
            "attention sinks": self.sinks,
            "another scale of scores": self.scale is not None,
        }
        return " and ".join(name for name, has_it in properties.items() if has_it)

    @property
    def interleaved(self) -> bool:
        """True if rotary embedding rotates adjacent elements instead of elements half a head apart."""
        return False

    @property
    def unsupported(self) -> str | None:
        """Reason why only transformers' modules compute the layers, as the beginning of a sentence."""
        return None

    @property
    def reach(self) -> int | None:
        """The longest sequence, in tokens, that all layers can compute; ``None`` if there is no limit."""
        return None

    @property
    def window(self) -> int | None:
        """The narrowest window of any layer."""
        return min((window for window in self.windows if window is not None), default=None)

    def rotary_size(self, model: ModelDimensions) -> int:
        return int(model.head_dim * self.rotary_fraction)

    def value_size(self, model: ModelDimensions) -> int:
        return model.head_dim

    def sizes(self, model: ModelDimensions) -> dict[str, int]:
        """Return the sizes that only this kind has, by the names that conversion rules use."""
        return {} if self.linear is None else self.linear.sizes

    def matrices(self, model: ModelDimensions) -> int:
        """Return the elements of the matrices."""
        heads = (3 if self.output_gate else 2) * model.num_heads + 2 * model.num_kv_heads
        linear = 0 if self.linear is None else self.linear.matrices(model.hidden_size)
        return model.attention_layers * model.hidden_size * model.head_dim * heads + linear

    def vectors(self, model: ModelDimensions) -> int:
        """Return the elements of norms inside attention, of biases, and of convolutions."""
        biases = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim * model.qkv_bias
        linear = 0 if self.linear is None else self.linear.vectors
        outputs = model.hidden_size * self.output_bias + model.num_heads * self.sinks
        return model.attention_layers * (biases + 2 * model.head_dim * model.qk_norm + outputs) + linear

    def cache_elements(self, model: ModelDimensions, gpus: int) -> int:
        """Return the elements that an engine caches for one token on each of ``gpus`` GPUs."""
        return model.attention_layers * 2 * -(-model.num_kv_heads // gpus) * model.head_dim

    def split_columns(self, model: ModelDimensions) -> dict[str, int]:
        """Return further sizes that tensor-parallel ranks split, by their names for the user."""
        return {}


@dataclass(frozen=True, slots=True)
class ForeignAttention(Attention):
    """Layers that this project has no formulas for. Parameters are estimated as for a Llama.

    Attributes:
        unsupported: see ``Attention``.
        reach: the narrowest chunk of any layer.
    """

    unsupported: str = field()  # without it, the base's property would be the default
    reach: int | None = None

    reloads: ClassVar[bool] = False  # some tensors are neither parameters nor buffers

    @property
    def special(self) -> str:
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDimensions:
    """Sizes of a causal language model, in Hugging Face's terms.

    Attributes:
        family: a name in ``FAMILIES``, or ``OTHER``. A model of another family has only sizes, lengths and token ids;
            its ``norm_eps`` and ``rope_theta`` are 0.
        attention: the kind of the layers, with further sizes.
        rope_scaling: the checkpoint's scaling parameters (with their "rope_type"), or ``None``.
        qkv_bias: query, key and value projections have biases.
        qk_norm: queries and keys pass a per-head RMSNorm.
        zero_centered_norms: norms multiply by 1 + weight, except those inside linear attention.
        capped_logits: logits are capped, which only transformers' modules do.
        post_norms: outputs of attention and of MLPs pass a norm, too.
        eos_token_ids: from ``generation_config.json`` if present, else from ``config.json``.
        num_experts: 0 for dense models; the ``moe_*`` fields are meaningful only above 0.
        dense_layers: number of leading layers without experts in a mixture of experts.
        moe_shared_ffn_hidden_size: total size of the experts that every token goes to.
        moe_shared_gate: their output is multiplied by the sigmoid of a gate, one for each token.
        moe_sigmoid: a router's scores are sigmoids, and a bias that is not a parameter affects only the choice
            (DeepSeek-V3, arXiv:2412.19437, section 2.1.2); otherwise scores are a softmax.
        moe_groups, moe_top_groups: experts are chosen from the best groups only.
        moe_bias: routers and experts have biases.
        moe_scaling: factor of the chosen experts' weights.
        tower: the checkpoint also has a vision tower, which is kept as it is.
        values: a linear map from hidden states to one number, ``VALUE_HEAD``, takes the place of the logits.
        counted: parameters in total, and in the matrix products that one token goes through. Planning counts them on
            the model itself for foreign models.
    """

    family: str
    attention: Attention = Attention()
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
    zero_centered_norms: bool = False
    post_norms: bool = False
    capped_logits: bool = False
    eos_token_ids: tuple[int, ...]
    num_experts: int = 0
    moe_top_k: int = 0
    moe_ffn_hidden_size: int = 0
    moe_norm_topk_prob: bool = True
    dense_layers: int = 0
    moe_shared_ffn_hidden_size: int = 0
    moe_shared_gate: bool = False
    moe_sigmoid: bool = False
    moe_groups: int = 1
    moe_top_groups: int = 1
    moe_bias: bool = False
    moe_scaling: float = 1.0
    tower: bool = False
    values: bool = False
    counted: tuple[int, int] | None = None

    @property
    def rotary_dim(self) -> int:
        """Number of elements with rotary embedding in a query or key head."""
        return self.attention.rotary_size(self)

    def training_flops(self, lengths: Iterable[int], lora: bool = False) -> float:
        """Count the FLOPs of forward and backward on causal sequences of these lengths, without recomputation.

        An element of a matrix takes 6 per token (Narayanan et al., arXiv:2104.04473, appendix), or 4 without
        a gradient of its own. Softmax attention takes 6 for every seen pair, head and element of a query or value.
        Recurrences of linear attention do not count.

        Args:
            lengths: tokens of every sequence.
            lora: only low-rank factors are trained; their own FLOPs do not count.
        """
        windows = self.attention.windows or (None,) * self.attention_layers
        elements = self.num_heads * (self.head_dim + self.value_dim)
        total = 0.0
        for length in lengths:
            near = [length if window is None else min(window, length) for window in windows]
            pairs = sum(width * length - width * (width - 1) / 2 for width in near)
            total += (4 if lora else 6) * self.active_parameters * length + 6 * pairs * elements
        return total

    @property
    def value_dim(self) -> int:
        """Number of elements in a value head."""
        return self.attention.value_size(self)

    @property
    def attention_layers(self) -> int:
        """Number of layers without linear attention."""
        return self.num_layers - (0 if self.attention.linear is None else len(self.attention.linear.layers))

    @property
    def expert_layers(self) -> range:
        """Indices of the layers with experts."""
        return range(self.dense_layers, self.num_layers) if self.num_experts else range(0)

    def mlp_parameters(self, experts: int) -> int:
        """Return the elements of all layers' feed-forward matrices, with ``experts`` experts per layer and routers."""
        of_experts = len(self.expert_layers)
        shared = 3 * self.moe_shared_ffn_hidden_size + self.moe_shared_gate
        routed = 3 * experts * self.moe_ffn_hidden_size + shared + self.num_experts
        dense = 3 * self.ffn_hidden_size
        return self.hidden_size * ((self.num_layers - of_experts) * dense + of_experts * routed)

    @property
    def active_parameters(self) -> int:
        """Parameters in the matrix products of one token: all layers, ``moe_top_k`` experts, the head."""
        if self.counted is not None:
            return self.counted[1]
        layers = self.attention.matrices(self) + self.mlp_parameters(self.moe_top_k)
        return layers + self.hidden_size * (1 if self.values else self.vocab_size)

    def is_ignored(self, name: str) -> bool:
        """Return whether some checkpoints store this Hugging Face tensor without it being a weight of this model."""
        tied_head = self.tied_embeddings and name in HEADS
        return tied_head or name.endswith("rotary_emb.inv_freq")

    @property
    def num_parameters(self) -> int:
        """Number of parameters in a Hugging Face checkpoint; a tied embedding counts once."""
        if self.counted is not None:
            return self.counted[0]
        attention = self.attention.matrices(self) + self.attention.vectors(self)
        norms = (4 if self.post_norms else 2) * self.num_layers * self.hidden_size
        of_expert = (2 * self.moe_ffn_hidden_size + self.hidden_size + 1) * self.moe_bias + self.moe_sigmoid
        routing_biases = len(self.expert_layers) * self.num_experts * of_expert
        head = 1 if self.values else 0 if self.tied_embeddings else self.vocab_size
        outer = self.hidden_size * (self.vocab_size + head + 1)
        return attention + norms + self.mlp_parameters(self.num_experts) + routing_biases + outer

    @classmethod
    def from_checkpoint(cls, directory: Path, values: bool = False) -> Self:
        """Read ``config.json`` (and ``generation_config.json``) of a Hugging Face checkpoint.

        ``values``: describe the value model made from it. The checkpoint may be a value model already.

        Raises:
            ConfigError: file missing, not JSON, not a causal language model, or sizes missing or wrong.
        """
        path = Path(directory) / "config.json"
        if not path.is_file():
            raise ConfigError(f"model.path={directory}{what_instead(Path(directory))}")
        raw = config_json.read_object(path)
        if values and isinstance(architectures := raw.get("architectures"), list):
            raw["architectures"] = [_CLASSIFIER.sub(_CAUSAL[0], str(name)) for name in architectures]
        settings = language_settings(raw)
        found = replace(cls._from_raw(settings or raw, path), tower=settings is not None and not values)
        return replace(found, values=True, tied_embeddings=False) if values else found

    @classmethod
    def _from_raw(cls, raw: dict[str, Any], path: Path) -> Self:
        architectures = raw.get("architectures") or ["(none)"]
        architecture = architectures[0] if isinstance(architectures, list) else architectures
        if not isinstance(architecture, str) or not architecture.endswith(_CAUSAL):
            remedy = f"use {_known()}, or with trainer.backend=fsdp another ...ForCausalLM"
            raise ConfigError(f"{path}: architecture {architecture} is not a causal language model; {remedy}")
        try:
            try:
                fields = _of_known(raw, architecture)
            except config_json.UnsupportedError as reason:
                fields = _of_another(raw, path, f"{path}: {reason}")
            return cls(eos_token_ids=config_json.eos_ids(raw, path.parent, fields["vocab_size"]), **fields)
        except (KeyError, ValueError) as error:
            problem = f"key {error} is missing" if isinstance(error, KeyError) else str(error)
            raise ConfigError(f"{path}: {problem}; re-export the checkpoint with transformers") from error


def _of_another(raw: dict[str, Any], path: Path, reason: str) -> dict[str, Any]:
    try:
        chunk, windows = config_json.chunk(raw), config_json.windows(raw)
        attention = ForeignAttention(unsupported=reason, reach=chunk, windows=windows)
        return {"family": OTHER, "attention": attention, **config_json.any_model(raw)}
    except KeyError as error:
        raise ConfigError(
            f"{path}: model_type {raw.get('model_type', '(none)')} has no {error}, under this or another known name; "
            "use a decoder whose configuration has its numbers of layers, attention heads and positions, and its width"
        ) from error


def _known() -> str:
    return ", ".join(family.architecture for family in FAMILIES.values())


def _of_known(raw: dict[str, Any], architecture: str) -> dict[str, Any]:
    """Read a known family. Raises ``config_json.UnsupportedError`` for all others."""
    likely_first = sorted(FAMILIES, key=lambda name: name != raw.get("model_type"))  # the others need not be imported
    found = (FAMILIES[name] for name in likely_first)
    family = next((each for each in found if each.architecture == architecture), None)
    if family is None:
        raise config_json.UnsupportedError(f"architecture {architecture} is not one of {_known()}")
    return {"family": family.name, **family.read(raw)}
