"""transformers' gated delta nets on packs: their own projections, norm and gate, around our packed recurrence."""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from backends.fsdp.attention import TokenMixers


def _qwen3_next(layer: Any, hidden: Tensor) -> tuple[Tensor, ...]:
    projected = layer.in_proj_qkvz(hidden), layer.in_proj_ba(hidden)
    return tuple(part[0] for part in layer.fix_query_key_value_ordering(*projected))


def _qwen3_5(layer: Any, hidden: Tensor) -> tuple[Tensor, ...]:
    sizes = [layer.key_dim, layer.key_dim, layer.value_dim]
    q, k, v = layer.in_proj_qkv(hidden)[0].split(sizes, dim=1)
    heads = [(q, layer.head_k_dim), (k, layer.head_k_dim), (v, layer.head_v_dim)]
    z, b, a = (project(hidden)[0] for project in (layer.in_proj_z, layer.in_proj_b, layer.in_proj_a))
    return *(x.unflatten(1, (-1, size)) for x, size in heads), z, b, a


_PROJECTIONS: dict[str, Callable[[Any, Tensor], tuple[Tensor, ...]]] = {
    "Qwen3NextGatedDeltaNet": _qwen3_next,
    "Qwen3_5GatedDeltaNet": _qwen3_5,
    "Qwen3_5MoeGatedDeltaNet": _qwen3_5,
}
"""Queries, keys, values, gates, and inputs of step sizes and decays, of one row of tokens, by class."""


def replace_recurrence(layer: nn.Module) -> bool:
    """Let the gated delta nets in a decoder's layer compute packs. Return whether there are any."""
    found = [module for module in layer.modules() if type(module).__name__ in _PROJECTIONS]
    for module in found:
        module.forward = partial(_forward, module, module.forward)
    return bool(found)


def _forward(
    layer: Any, own: Callable[..., Tensor], hidden_states: Tensor, packed: TokenMixers | None = None, **options: Any
) -> Tensor:
    """Compute (1, T, H) states of a pack; outside one, what transformers computes."""
    if packed is None or packed.recurrence is None:
        return own(hidden_states=hidden_states, **options)
    q, k, v, z, b, a = _PROJECTIONS[type(layer).__name__](layer, hidden_states)
    out = packed.recurrence.mix(q, k, v, a, b, layer.conv1d.weight[:, 0], layer.A_log, layer.dt_bias)
    normed = layer.norm(out.flatten(0, 1), z.reshape(-1, out.shape[2]))
    result: Tensor = layer.out_proj(normed.view(1, len(out), -1))
    return result
