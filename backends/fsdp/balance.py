"""The routers' balancing loss, computed from the logits that transformers' models return."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from backends.common.balance import RoutedTokens, sequence_load


def balance_loss(routers: Sequence[Tensor], tokens: RoutedTokens, top_k: int, context: dist.ProcessGroup) -> Tensor:
    """What is added to the loss of one micro-batch: this rank's tokens' share, summed over layers and scaled.

    Takes note of every layer's share in ``tokens.loss``.

    Args:
        routers: (T_local, E) logits of every layer.
        tokens: whose they are.
        top_k: experts per token.
        context: the ranks that hold parts of the same sequences.
    """
    total = torch.zeros((), dtype=torch.float32, device=routers[0].device)
    for logits in routers:
        scores = logits.softmax(dim=-1, dtype=torch.float32)
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, scores.topk(top_k, dim=-1).indices, True)
        load = sequence_load(chosen, tokens, top_k, context)
        # The sum over tokens of <f of its sequence, its softmax> is sum_s T_s * <f, P>.
        loss = scores.shape[-1] * (scores * load[tokens.sequence]).sum()
        tokens.loss.sums.append(loss.detach().double())
        total = total + loss
    return tokens.loss.scale * total
