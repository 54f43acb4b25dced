"""Modules of latent attention: 0.16 builds the spec's modules, 0.19 chooses some itself."""

from typing import Any

from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from backends.megatron.installed import IS_NEW, require

_PARTS = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj", "q_layernorm", "kv_layernorm")

if IS_NEW:
    require(MLASelfAttention, "_resolve_qk_norm_config")


class AsSpecified:
    """Mixin that builds the spec's modules in 0.19, too, instead of Transformer Engine's for some query norms."""

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        return {name: getattr(submodules, name) for name in _PARTS}
