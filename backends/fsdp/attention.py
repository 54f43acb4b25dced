"""Packed attention and recurrence in transformers' layers, and one rank's model input from a pack.

Attention is an attention implementation of transformers. Gated delta nets keep their own projections, norm and gate,
around our packed recurrence.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from backends.common.attention import AnyAttention, choose_attention
from backends.common.linear_attention import Recurrence
from backends.common.step.balance import NO_BALANCE, Balance, RoutedTokens
from backends.common.step.packs import MicroBatch, ResponseRows, on_device
from backends.common.step.routes import Replay
from slime_like.algorithms.context import split_for_context_parallel
from slime_like.errors import TrainerError
from slime_like.trajectory import PackedTrajectory

NAME = "slime_like_packed"
"""Name of the attention in transformers. No mask function is registered for it, so no mask is ever created."""

_KEPT = "slime_like_boundaries"

_HARMLESS = frozenset(
    {
        "position_ids",
        "position_embeddings",
        "cache_position",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "past_key_values",
        "cu_seq_lens_q",
        "cu_seq_lens_k",
        "max_length_q",
        "max_length_k",
        "num_items_in_batch",
        "logits_to_keep",
    }
)
"""Further arguments that models pass down without effect on attention. All others must be empty."""


@dataclass(frozen=True, slots=True)
class TokenMixers:
    """Attention and recurrence within one micro-batch's sequences, passed from the model's call down to every layer.

    Attributes:
        recurrence: of layers with linear attention, if there are any.
    """

    attention: AnyAttention
    recurrence: Recurrence | None = None


def forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    packed: TokenMixers | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention for the model's layers: (1, H, T, D) rotated queries, (1, G, T, D) keys and values.

    Args:
        sliding_window: keys that a query sees at most, its own included.
        s_aux: (H,) sinks.

    Returns:
        (1, T, H, D), and no weights.

    Raises:
        TrainerError: the micro-batch's attention did not arrive, or the model requests another kind of attention.
    """
    packed = getattr(module, _KEPT, None) if packed is None else packed
    if packed is None or attention_mask is not None or query.shape[0] != 1:
        raise TrainerError(
            "attention needs the pack's boundaries, and no mask",
            code="model-hands-on-no-boundaries",
            who=type(module).__name__,
            remedy="this model does not pass on the arguments it is called with, so use another one, or "
            "trainer.backend=megatron if it supports the family",
        )
    _require_plain(module, **options)
    # Kernels take tokens first; reading them across heads would cost several times the arithmetic.
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in (query, key, value))
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    return packed.attention.attend(q, k, v, scale, sliding_window, s_aux)[None], None


def hand_on(layer: torch.nn.Module) -> None:
    """Let a layer's attention find the current call's boundaries: some layers pass down only arguments they know."""

    def keep(_: torch.nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        for module in attentions:
            setattr(module, _KEPT, options.get("packed"))

    attentions = [module for module in layer.modules() if type(module).__name__.endswith("Attention")]
    layer.register_forward_pre_hook(keep, with_kwargs=True)


def _require_plain(
    module: torch.nn.Module,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **options: Any,
) -> None:
    """Reject what these kernels would ignore."""
    others = [name for name, value in options.items() if value is not None and name not in _HARMLESS]
    if dropout:
        others.append("dropout")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        others.append("is_causal=False")
    if others:
        raise TrainerError(
            f"{type(module).__name__} asks for {', '.join(others)} in attention, which packed attention does not "
            "support",
            code="attention-not-supported",
            remedy="use a model without them",
        )


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
        module.forward = partial(_gated_delta_forward, module, module.forward)
    return bool(found)


def _gated_delta_forward(
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


@dataclass(slots=True)
class FsdpInput(MicroBatch):
    """One pack on this rank's device; ``routed`` is set if routers balance or replay."""

    mixers: TokenMixers
    responses: ResponseRows
    routed: RoutedTokens | None


def model_input(
    pack: PackedTrajectory,
    device: torch.device,
    context: dist.ProcessGroup,
    by_package: bool = False,
    balance: Balance = NO_BALANCE,
    replay: Replay | None = None,
    recurs: bool = False,
) -> FsdpInput:
    """Take this rank's part of ``pack``, which is the same on every rank that shares it.

    ``by_package``: several context ranks attend with ring-flash-attn instead of our all-gather. ``recurs``: some layers
    have linear attention.
    """
    shard = split_for_context_parallel(pack, context.size(), context.rank(), layout="contiguous")
    attention = choose_attention("ring_flash_attn" if by_package else "allgather", shard, context)
    routed = RoutedTokens.of(pack, shard, slice(None), balance, replay)
    recurrence = Recurrence.of(shard, context) if recurs else None
    mixers, responses = TokenMixers(attention, recurrence), ResponseRows.of(pack, shard)
    needed = replace(pack, teacher_hidden=None)  # ``responses`` has this rank's part
    moved, shard, mixers, responses, routed = on_device((needed, shard, mixers, responses, routed), device)
    return FsdpInput(pack, moved, shard, context, mixers, responses, routed)
