"""Packed attention as an attention implementation of transformers."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from backends.common.attention.choice import AnyAttention
from backends.common.linear_attention import Recurrence
from slime_like.errors import TrainerError

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
