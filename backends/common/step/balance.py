"""Load balancing of experts, and the routing information of a micro-batch.

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

from collections.abc import Mapping
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

    def metrics(self, layers: int, device: torch.device) -> dict[str, Any]:
        """Return fields of ``GRPOStats``: the mean over layers and tokens, without coefficient; 1 is an even load.
        Collective over the world.
        """
        total = torch.zeros((), dtype=torch.float64, device=device)
        if self.sums:
            total += torch.stack(self.sums).sum()
        dist.all_reduce(total)
        return {"moe_aux_loss": total / (self.tokens * layers)}


@dataclass(slots=True)
class ExpertLoads:
    """One step's loads of experts on one rank, which move routers' biases.

    An expert that is chosen less than the mean gets a higher bias (Wang et al., arXiv:2408.15664, algorithm 1;
    DeepSeek-V3, arXiv:2412.19437, section 2.1.2). Loads are whole numbers, so biases are the same in every layout.

    Attributes:
        rate: size of a move.
        counts: (layers, E) int64, real tokens that go to each expert; 0 in layers without experts, and of other stages.
    """

    rate: float
    counts: Tensor

    @classmethod
    def of_step(cls, rate: float, dimensions: ModelDimensions, device: torch.device) -> Self | None:
        """Create it for a step; ``None`` if biases are frozen."""
        shape = (dimensions.num_layers, dimensions.num_experts)
        return cls(rate, torch.zeros(shape, dtype=torch.int64, device=device)) if rate else None

    @torch.no_grad()
    def move(self, biases: Mapping[int, Tensor]) -> None:
        """Sum ``counts`` over all ranks, and move this rank's ``biases``, given by layer. Collective over the world.

        Every token of a layer is routed on one rank. If several did, in equal numbers, no sign would change.
        """
        dist.all_reduce(self.counts)
        below = self.counts.sum(dim=1, keepdim=True) - self.counts.shape[1] * self.counts
        for layer, bias in biases.items():
            bias += self.rate * below[layer].sign()

    def metrics(self) -> dict[str, Any]:
        """Return fields of ``GRPOStats``, after ``move``: the largest load over its layer's mean."""
        loads = self.counts.double()
        return {"router_load_max": (loads.amax(dim=1) / loads.mean(dim=1).clamp_min(1e-9)).amax()}


@dataclass(frozen=True, slots=True)
class Balance:
    """One step's balancing of experts: a loss, moves of the biases, both or neither."""

    loss: BalanceLoss | None = None
    loads: ExpertLoads | None = None


NO_BALANCE = Balance()


@dataclass(frozen=True, slots=True)
class RoutedTokens:
    """Routing information of a micro-batch, passed along with its hidden states.

    Attributes:
        sequence: (t,) int64, each local token's sequence in its pack; S for padding and in fillers. Sequences that
            share prefixes count as one.
        lengths: (S,) tokens of every sequence, on all ranks together.
        balance: the step's balancing, in training.
        routes: given experts, or a place to record the router's; fillers have none.
        routed: by layer, its (t, E) logits and (t, k) experts, which FSDP's trainer takes after the forward pass. A
            layer that was taken is ``None``, so recomputation adds nothing.
        counted: layers whose loads are counted.
    """

    sequence: Tensor
    lengths: Tensor
    balance: Balance
    routes: TokenRoutes | None = None
    routed: dict[int, tuple[Tensor, Tensor] | None] = field(default_factory=dict)
    counted: set[int] = field(default_factory=set)

    @classmethod
    def of(
        cls,
        pack: PackedTrajectory,
        shard: ContextShard,
        rows: slice,
        balance: Balance,
        replay: Replay | None = None,
    ) -> Self | None:
        """Create it for the ``rows`` of the token axis of ``shard``; ``None`` if routers need nothing."""
        if balance == NO_BALANCE and replay is None:
            return None
        source, lengths = shard.source[rows], pack.prompt_lens + pack.response_lens
        sequence = pack.sequence_mask[source.clamp_min(0)].long()
        is_real = (source >= 0) & (sequence >= 0) & (not pack.is_filler)
        if shard.parents is not None:
            trees, lengths = tree_of_tokens(pack)
            sequence = trees[source.clamp(0, len(trees) - 1)]
        routes = None if replay is None or pack.is_filler else TokenRoutes.of(pack, shard, rows, replay)
        return cls(torch.where(is_real, sequence, len(lengths)), lengths, balance, routes)

    def record(self, pack: PackedTrajectory, group: dist.ProcessGroup) -> None:
        """Give ``pack`` the routes that a recording pass took. Collective over the ranks that hold parts of it."""
        if self.routes is not None:
            self.routes.store(pack, group)

    @torch.no_grad()
    def count(self, loads: ExpertLoads, layer: int, chosen: Tensor) -> None:
        """Add the choices of a layer's real tokens, (t, E) bool. A layer that is recomputed counts once."""
        if layer not in self.counted:
            self.counted.add(layer)
            loads.counts[layer] += (chosen & (self.sequence < len(self.lengths))[:, None]).sum(dim=0)

    def layer_loss(self, logits: Tensor, chosen: Tensor, sigmoid: bool, top_k: int, group: dist.ProcessGroup) -> Tensor:
        """Return one layer's scaled loss of this rank's tokens; ``balance`` records its share.

        Args:
            logits: (t, E) of the router.
            chosen: (t, E) bool, the experts of every token.
            sigmoid: scores are sigmoids, not a softmax.
            top_k: choices per token.
            group: the ranks that hold parts of the same sequences.
        """
        assert self.balance.loss is not None
        if sigmoid:
            affinity = logits.float().sigmoid()
            probability = affinity / affinity.sum(dim=-1, keepdim=True)
        else:
            probability = logits.softmax(dim=-1, dtype=torch.float32)
        load = self._load(chosen, top_k, group)
        # The sum over tokens of <f of its sequence, its p> is sum_s T_s * <f, P>: every rank adds its tokens.
        loss = logits.shape[-1] * (probability * load[self.sequence]).sum()
        self.balance.loss.sums.append(loss.detach().double())
        return self.balance.loss.scale * loss

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


def choices(logits: Tensor, experts: Tensor) -> Tensor:
    """Return (t, E) bool, the chosen ``experts``, (t, k), of tokens with these (t, E) ``logits``."""
    return torch.zeros_like(logits, dtype=torch.bool).scatter_(1, experts, True)


def balance_loss(dimensions: ModelDimensions, tokens: RoutedTokens, context: dist.ProcessGroup) -> Tensor:
    """Take the routers' logits out of ``tokens`` and return this rank's share of the loss, summed over layers.

    ``context``: the ranks that hold parts of the same sequences.
    """
    total = torch.zeros((), dtype=torch.float32, device=tokens.sequence.device)
    for layer in dimensions.expert_layers:
        routed = tokens.routed[layer]
        assert routed is not None
        logits, experts = routed
        chosen = choices(logits, experts)
        total = total + tokens.layer_loss(logits, chosen, dimensions.moe_sigmoid, dimensions.moe_top_k, context)
        tokens.routed[layer] = None
    return total
