"""The routers' balancing loss, computed from the logits that transformers' models return."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from backends.common.step.balance import RoutedTokens
from slime_like.models.dimensions import ModelDimensions

_RANKED_BY = 2
"""Groups of experts are ranked by the sum of so many of their scores, as in DeepSeek-V3."""


def balance_loss(
    dimensions: ModelDimensions,
    biases: Sequence[Tensor],
    logits: Sequence[Tensor],
    tokens: RoutedTokens,
    context: dist.ProcessGroup,
) -> Tensor:
    """Balancing loss of one micro-batch: this rank's tokens' share, summed over layers and scaled.

    Args:
        biases: (E,) of every layer with experts, added to sigmoids for the choice; not used for a softmax.
        logits: (T_local, E) of every layer with experts.
        context: the ranks that hold parts of the same sequences.
    """
    total = torch.zeros((), dtype=torch.float32, device=logits[0].device)
    for layer_logits, bias in zip(logits, biases if dimensions.moe_sigmoid else [None] * len(logits), strict=True):
        chosen = _chosen(dimensions, layer_logits, bias)
        total += tokens.layer_loss(layer_logits, chosen, dimensions.moe_sigmoid, dimensions.moe_top_k, context)
    return total


@torch.no_grad()
def _chosen(dimensions: ModelDimensions, logits: Tensor, bias: Tensor | None) -> Tensor:
    """(T, E) bool, the highest scores; sigmoids, which have a bias, within the best groups of experts.

    DeepSeek-V3, arXiv:2412.19437, eq. 16, and section 2.1.2 for groups.
    """
    scores = logits.float()
    if bias is not None:
        scores = scores.sigmoid() + bias
        grouped = scores.unflatten(-1, (dimensions.moe_groups, -1))
        rank = grouped.topk(_RANKED_BY, dim=-1).values.sum(dim=-1)
        allowed = _marked(rank, dimensions.moe_top_groups)[..., None].expand_as(grouped).flatten(-2)
        scores = scores.masked_fill(~allowed, float("-inf"))
    return _marked(scores, dimensions.moe_top_k)


def _marked(scores: Tensor, count: int) -> Tensor:
    """Mark the ``count`` highest of the last axis."""
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.topk(count, dim=-1).indices, True)
