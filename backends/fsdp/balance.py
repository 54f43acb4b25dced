"""The routers' balancing loss, computed from the logits that transformers' models return."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist
from torch import Tensor

from backends.common.step.balance import RoutedTokens
from slime_like.models.dimensions import ModelDimensions

_RANKED_BY = 2
"""Groups of experts are ranked by the sum of so many of their scores, as in DeepSeek-V3."""


@dataclass(frozen=True, slots=True)
class Routers:
    """Choice of a model's routers: the highest softmax, or sigmoids with a bias, within the best groups of experts.

    Attributes:
        top_k: experts per token.
        groups, top_groups: groups of experts, and how many of them a token's experts may be in; for sigmoids.
        biases: (E,) of every layer with experts, added to sigmoids for the choice; ``None`` for a softmax.
    """

    top_k: int
    groups: int
    top_groups: int
    biases: Sequence[Tensor] | None

    @classmethod
    def of(cls, dimensions: ModelDimensions, biases: Sequence[Tensor]) -> Self:
        """Those of a known family; ``biases`` in the order of the layers."""
        used = biases if dimensions.moe_sigmoid else None
        return cls(dimensions.moe_top_k, dimensions.moe_groups, dimensions.moe_top_groups, used)

    def balance_loss(self, logits: Sequence[Tensor], tokens: RoutedTokens, context: dist.ProcessGroup) -> Tensor:
        """Balancing loss of one micro-batch: this rank's tokens' share, summed over layers and scaled.

        Args:
            logits: (T_local, E) of every layer with experts.
            context: the ranks that hold parts of the same sequences.
        """
        total = torch.zeros((), dtype=torch.float32, device=logits[0].device)
        biases: Sequence[Tensor | None] = self.biases or [None] * len(logits)
        for layer_logits, bias in zip(logits, biases, strict=True):
            chosen = self._chosen(layer_logits, bias)
            total = total + tokens.layer_loss(layer_logits, chosen, self.biases is not None, self.top_k, context)
        return total

    @torch.no_grad()
    def _chosen(self, logits: Tensor, bias: Tensor | None) -> Tensor:
        """(T, E) bool: DeepSeek-V3, arXiv:2412.19437, eq. 16, and section 2.1.2 for groups."""
        scores = logits.float()
        if bias is not None:
            scores = scores.sigmoid() + bias
            grouped = scores.unflatten(-1, (self.groups, -1))
            rank = grouped.topk(_RANKED_BY, dim=-1).values.sum(dim=-1)
            allowed = _marked(rank, self.top_groups)[..., None].expand_as(grouped).flatten(-2)
            scores = scores.masked_fill(~allowed, float("-inf"))
        return _marked(scores, self.top_k)


def _marked(scores: Tensor, count: int) -> Tensor:
    """Mark the ``count`` highest of the last axis."""
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.topk(count, dim=-1).indices, True)
