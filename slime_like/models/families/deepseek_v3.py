"""DeepSeek-V3: latent attention, leading dense layers, shared experts, and group-limited sigmoid routers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from slime_like.models import config_json
from slime_like.models.config_json import UnsupportedError, count, flag
from slime_like.models.dimensions import Attention, Family, ModelDimensions


@dataclass(frozen=True, slots=True)
class LatentAttention(Attention):
    """Sizes of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    ``head_dim`` of the model applies to queries and keys only.

    Attributes:
        query_rank: rank of the compressed query; ``None`` if queries are projected directly.
        kv_rank: rank of the compressed keys and values, shared by all heads.
        nope_dim, rope_dim: parts of a query or key head without and with rotary embedding; all heads share the key's
            rotary part.
        value_dim: size of a value head.
    """

    query_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    interleaved: bool = True

    @property
    def special(self) -> str:
        return "latent attention (DeepSeek-V3's)"

    def rotary_size(self, model: ModelDimensions) -> int:
        return self.rope_dim

    def value_size(self, model: ModelDimensions) -> int:
        return self.value_dim

    def sizes(self, model: ModelDimensions) -> dict[str, int]:
        return {
            "query_rank": self.query_rank or 0,
            "kv_rank": self.kv_rank,
            "compressed": self.kv_rank + self.rope_dim,
            "expanded": model.num_heads * (self.nope_dim + self.value_dim),
            "value": model.num_heads * self.value_dim,
        }

    def matrices(self, model: ModelDimensions) -> int:
        size, query = self.sizes(model), model.num_heads * model.head_dim
        queries = query * (self.query_rank or model.hidden_size) + model.hidden_size * size["query_rank"]
        keys = model.hidden_size * size["compressed"] + self.kv_rank * size["expanded"]
        return model.num_layers * (queries + keys + size["value"] * model.hidden_size)

    def vectors(self, model: ModelDimensions) -> int:
        return model.num_layers * (self.kv_rank + (self.query_rank or 0))

    def cache_elements(self, model: ModelDimensions, gpus: int) -> int:
        """Return the elements of the compressed vectors, which engines cache instead of keys and values."""
        return model.num_layers * self.sizes(model)["compressed"]

    def split_columns(self, model: ModelDimensions) -> dict[str, int]:
        keys = {"columns of compressed keys and values": self.sizes(model)["compressed"]}
        return keys if self.query_rank is None else keys | {"columns of compressed queries": self.query_rank}


def _read(raw: dict[str, Any]) -> dict[str, Any]:
    if flag(raw, "attention_bias"):
        raise UnsupportedError("its latent attention has biases (attention_bias=true)")
    attention = LatentAttention(
        query_rank=None if raw.get("q_lora_rank") is None else count(raw, "q_lora_rank"),
        kv_rank=count(raw, "kv_lora_rank"),
        nope_dim=count(raw, "qk_nope_head_dim"),
        rope_dim=count(raw, "qk_rope_head_dim"),
        value_dim=count(raw, "v_head_dim"),
        interleaved=flag(raw, "rope_interleave", default=True),
    )
    return config_json.decoder(
        raw,
        attention=attention,
        head_dim=attention.nope_dim + attention.rope_dim,
        num_kv_heads=count(raw, "num_attention_heads"),
        **config_json.sigmoid_experts(raw),
    )


DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    _read,
    megatron="backends.megatron.families.deepseek_v3:LatentFamily",
    small={
        "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 64, "kv_lora_rank": 48,
        "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32,
        "head_dim": 16,  # in transformers' configuration, the rotary part only
    },
    tiny={
        "first_k_dense_replace": 1, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 4,
        "n_group": 4, "topk_group": 2, "moe_intermediate_size": 48, "num_nextn_predict_layers": 0,
        "moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid",  # SGLang reads these
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 128,
        },
    },
)  # fmt: skip
