"""What routers need besides hidden states: the load-balancing loss, and routes to replay (``routes``).

The loss is a mean over the real tokens of a step, whatever the layout and the micro-batches.

For one layer and one sequence s of T_s tokens, with E experts and k choices per token (DeepSeek-V3,
arXiv:2412.19437, eqs. 17 to 20; Switch Transformer, arXiv:2101.03961, eqs. 4 to 6, on one sequence):

    L_s = E * sum_e f_e * P_e,   f_e = (tokens of s that go to expert e) / (k * T_s),   P_e = mean over s of p_e

Here p is the softmax of a token's logits or, for sigmoid routers, the sigmoids divided by their sum. L_s is 1 for an
even load. A layer's loss is the mean of L_s over all tokens of the step, sum_s T_s * L_s / sum_s T_s; the objective
gets ``coefficient`` times the sum over layers. A sequence is in one pack, so its f is known as soon as its layer has
run: neither packing, windows nor any parallel axis affects the result. Prompt and masked tokens count, because they are
routed, too; padding and fillers do not. Sequences with shared prefixes (``trainer.share_prefixes``) count as one, and
their shared tokens count once.
"""

from dataclasses import dataclass, field
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from backends.common.process.agreement import rank_error
from backends.common.step.routes import Replay, TokenRoutes
from slime_like.algorithms.context import ContextShard
from slime_like.algorithms.packing.prefixes import tree_of_tokens
from slime_like.models.dimensions import ModelDimensions
from slime_like.trajectory import PackedTrajectory


@dataclass(slots=True)
class BalanceLoss:
    """One step's balancing loss on one rank.

    Attributes:
        scale: factor of ``sum_s T_s * L_s`` in the accumulated gradient. Gradients are divided by the objective's
            denominator at the end of a step; the scale replaces that divisor with the number of tokens.
        tokens: real tokens of the whole step.
        sums: detached float64 shares of ``sum_s T_s * L_s``, one per layer and micro-batch that ran on this rank.
    """

    scale: float
    tokens: int
    sums: list[Tensor] = field(default_factory=list)

    @classmethod
    def of_step(
        cls,
        coefficient: float,
        denominator: float | None,
        tokens: int | None,
        replicas: dist.ProcessGroup,
        device: torch.device,
    ) -> Self | None:
        """Create it for a step that divides gradients by ``denominator``; ``tokens`` are this replica's. Collective.

        ``None`` without a coefficient.

        Raises:
            TrainerError: the step began without the arguments that the loss needs.
        """
        if not coefficient:
            return None
        if denominator is None or tokens is None:
            raise rank_error(
                "begin_step",
                f"algorithm.moe_aux_loss_coef={coefficient:g} has a separate denominator",
                code="denominator",
                remedy="give begin_step the step's denominator and this replica's tokens, or set it to 0",
            )
        total = torch.tensor(tokens, dtype=torch.int64, device=device)
        dist.all_reduce(total, group=replicas)
        return cls(coefficient * denominator / int(total), int(total))

    def figures(self, layers: int, device: torch.device) -> dict[str, Any]:
        """Return fields of ``GRPOStats``: the mean over layers and tokens, without coefficient; 1 is an even load.
        Collective over the world.
        """
        total = torch.zeros((), dtype=torch.float64, device=device)
        if self.sums:
            total += torch.stack(self.sums).sum()
        dist.all_reduce(total)
        return {"moe_aux_loss": total / (self.tokens * layers)}


@dataclass(frozen=True, slots=True)
class RoutedTokens:
    """What routers need besides hidden states, passed along with the micro-batch.

    Attributes:
        sequence: (t,) int64, each local token's sequence in its pack; S for padding and in fillers. Sequences that
            share prefixes count as one.
        lengths: (S,) tokens of every sequence, on all ranks together.
        loss: the balancing loss, in training with one.
        routes: given experts, or a place to record the router's; fillers have none.
        routed: by layer, its (t, E) logits and (t, k) experts, which FSDP's trainer takes after the forward pass. A
            layer that was taken is ``None``, so recomputation adds nothing.
    """

    sequence: Tensor
    lengths: Tensor
    loss: BalanceLoss | None
    routes: TokenRoutes | None = None
    routed: dict[int, tuple[Tensor, Tensor] | None] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        pack: PackedTrajectory,
        shard: ContextShard,
        rows: slice,
        loss: BalanceLoss | None,
        replay: Replay | None = None,
    ) -> Self | None:
        """Create it for the ``rows`` of the token axis of ``shard``; ``None`` if routers need nothing."""
        if loss is None and replay is None:
            return None
        source, lengths = shard.source[rows], pack.prompt_lens + pack.response_lens
        sequence = pack.sequence_mask[source.clamp_min(0)].long()
        is_real = (source >= 0) & (sequence >= 0) & (not pack.is_filler)
        if shard.parents is not None:
            trees, lengths = tree_of_tokens(pack)
            sequence = trees[source.clamp(0, len(trees) - 1)]
        routes = None if replay is None or pack.is_filler else TokenRoutes.of(pack, shard, rows, replay)
        return cls(torch.where(is_real, sequence, len(lengths)), lengths, loss, routes)

    def record(self, pack: PackedTrajectory, group: dist.ProcessGroup) -> None:
        """Give ``pack`` the routes that a recording pass took. Collective over the ranks that hold parts of it."""
        if self.routes is not None:
            self.routes.store(pack, group)

    def layer_loss(self, logits: Tensor, chosen: Tensor, sigmoid: bool, top_k: int, group: dist.ProcessGroup) -> Tensor:
        """Return one layer's scaled loss of this rank's tokens; ``loss`` records its share.

        Args:
            logits: (t, E) of the router.
            chosen: (t, E) bool, the experts of every token.
            sigmoid: scores are sigmoids, not a softmax.
            top_k: choices per token.
            group: the ranks that hold parts of the same sequences.
        """
        assert self.loss is not None
        if sigmoid:
            affinity = logits.float().sigmoid()
            probability = affinity / affinity.sum(dim=-1, keepdim=True)
        else:
            probability = logits.softmax(dim=-1, dtype=torch.float32)
        load = self._load(chosen, top_k, group)
        # The sum over tokens of <f of its sequence, its p> is sum_s T_s * <f, P>: every rank adds its tokens.
        loss = logits.shape[-1] * (probability * load[self.sequence]).sum()
        self.loss.sums.append(loss.detach().double())
        return self.loss.scale * loss

    @torch.no_grad()
    def _load(self, chosen: Tensor, top_k: int, group: dist.ProcessGroup) -> Tensor:
        """Return (S + 1, E) float32: the share f of every expert in every sequence's choices; 0 for padding."""
        count = len(self.lengths)
        load = torch.zeros(count + 1, chosen.shape[1], dtype=torch.float32, device=chosen.device)
        load.index_add_(0, self.sequence, chosen.float())
        if group.size() > 1:
            dist.all_reduce(load, group=group)
        load[:count] /= top_k * self.lengths[:, None]
        load[count] = 0.0
        return load


def balance_loss(dimensions: ModelDimensions, tokens: RoutedTokens, context: dist.ProcessGroup) -> Tensor:
    """Take the routers' logits out of ``tokens`` and return this rank's share of the loss, summed over layers.

    ``context``: the ranks that hold parts of the same sequences.
    """
    total = torch.zeros((), dtype=torch.float32, device=tokens.sequence.device)
    for layer in dimensions.expert_layers:
        routed = tokens.routed[layer]
        assert routed is not None
        logits, experts = routed
        chosen = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, experts, True)
        total = total + tokens.layer_loss(logits, chosen, dimensions.moe_sigmoid, dimensions.moe_top_k, context)
        tokens.routed[layer] = None
    return total
