"""The router's load-balancing loss: a mean over the real tokens of a step, whatever the layout and the micro-batches.

For one layer and one sequence s of T_s tokens, with E experts of which every token takes k (DeepSeek-V3,
arXiv:2412.19437, eqs. 17 to 20; Switch Transformer, arXiv:2101.03961, eqs. 4 to 6, on one sequence):

    L_s = E * sum_e f_e * P_e,   f_e = (tokens of s that go to expert e) / (k * T_s),   P_e = mean over s of softmax_e

It is 1 where the load is even. A layer's loss is the mean of L_s over all tokens of the step, sum_s T_s * L_s / sum_s
T_s; the objective gets ``coefficient`` times the sum over layers. A sequence lies in one pack, so that its f is known
as soon as its layer has run: neither packing, nor windows, nor any parallel axis can show in the result. Prompt and
masked tokens count, for they are routed too; padding and fillers do not.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from backends.megatron.attention import PackedLayout
from slime_like.algorithms.context import ContextShard
from slime_like.trajectory import PackedTrajectory


@dataclass(slots=True)
class BalanceLoss:
    """One step's balancing loss on one rank.

    Attributes:
        scale: what ``sum_s T_s * L_s`` is multiplied by in the accumulated gradient. Gradients are divided by the
            objective's denominator when a step ends; the scale takes that out again and puts the tokens in its place.
        tokens: real tokens of the whole step.
        sums: detached float64 shares of ``sum_s T_s * L_s``, one per layer and micro-batch that ran on this rank.
    """

    scale: float
    tokens: int
    sums: list[Tensor] = field(default_factory=list)

    @classmethod
    def of_step(
        cls, coefficient: float, denominator: float, tokens: int, replicas: dist.ProcessGroup, device: torch.device
    ) -> BalanceLoss:
        """For a step whose gradients will be divided by ``denominator``; ``tokens`` are this replica's. Collective."""
        total = torch.tensor(tokens, dtype=torch.int64, device=device)
        dist.all_reduce(total, group=replicas)
        return cls(coefficient * denominator / int(total), int(total))

    def mean(self, layers: int, device: torch.device) -> Tensor:
        """Over layers and tokens, without coefficient: 1 is an even load. Collective over the world."""
        total = torch.zeros((), dtype=torch.float64, device=device)
        if self.sums:
            total += torch.stack(self.sums).sum()
        dist.all_reduce(total)
        return total / (self.tokens * layers)


@dataclass(frozen=True, slots=True)
class RoutedTokens:
    """Whose tokens a router sees; travels with the micro-batch.

    Attributes:
        sequence: (t,) int64, the sequence in its pack of every local token; S for padding and in fillers.
        lengths: (S,) tokens of every sequence, on all ranks together.
        loss: the step's balancing loss.
    """

    sequence: Tensor
    lengths: Tensor
    loss: BalanceLoss

    @classmethod
    def of(cls, pack: PackedTrajectory, shard: ContextShard, rows: slice, loss: BalanceLoss) -> RoutedTokens:
        """Those of ``shard`` that stand in ``rows`` of its token axis."""
        source = shard.source[rows]
        nobody = pack.num_sequences
        sequence = pack.sequence_mask[source.clamp_min(0)].long()
        is_real = (source >= 0) & (sequence >= 0) & (not pack.is_filler)
        return cls(torch.where(is_real, sequence, nobody), pack.prompt_lens + pack.response_lens, loss)


@dataclass
class RoutedLayout(PackedLayout):
    """What layers read beside hidden states, routers included.

    Attributes:
        routed: whose tokens the routers see, where the objective balances them.
    """

    routed: RoutedTokens | None = None


class _AddLoss(torch.autograd.Function):
    """Hands ``x`` on and makes the scalar ``loss`` part of the objective."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], torch.ones((), dtype=torch.float32, device=grads[0].device)


class BalancedRouter(TopKRouter):
    """Megatron's top-k router, whose probabilities carry the balancing loss where a micro-batch brings one."""

    def routing(self, logits: Tensor, padding_mask: Any = None) -> tuple[Tensor, Tensor]:
        """(t, E) probabilities and routing map. ``padding_mask`` is the micro-batch's ``RoutedTokens``, or ``None``.

        Under full recompute a layer runs twice; the run that autograd sees is the one that counts.
        """
        probs, routing_map = super().routing(logits)
        if padding_mask is None or not torch.is_grad_enabled():
            return probs, routing_map
        tokens: RoutedTokens = padding_mask
        scores = logits.view(-1, logits.shape[-1]).softmax(dim=-1, dtype=torch.float32)
        load = sequence_load(routing_map, tokens, self.topk, self.tp_cp_group)
        # The sum over tokens of <f of its sequence, its softmax> is sum_s T_s * <f, P>: every rank adds its own tokens.
        loss = scores.shape[-1] * (scores * load[tokens.sequence]).sum()
        tokens.loss.sums.append(loss.detach().double())
        return _AddLoss.apply(probs, tokens.loss.scale * loss), routing_map


@torch.no_grad()
def sequence_load(routing_map: Tensor, tokens: RoutedTokens, top_k: int, group: dist.ProcessGroup) -> Tensor:
    """(S + 1, E) float32: the share f of every expert in every sequence's choices; 0 for padding.

    Args:
        routing_map: (t, E) bool, this rank's choices.
        tokens: whose they are.
        top_k: choices per token.
        group: the ranks that hold parts of the same sequences.
    """
    count = len(tokens.lengths)
    load = torch.zeros(count + 1, routing_map.shape[1], dtype=torch.float32, device=routing_map.device)
    load.index_add_(0, tokens.sequence, routing_map.float())
    if group.size() > 1:
        dist.all_reduce(load, group=group)
    load[:count] /= top_k * tokens.lengths[:, None]
    load[count] = 0.0
    return load


class BalancedMoELayer(MoELayer):
    """Megatron's mixture of experts, whose router is told whose tokens it sees."""

    def forward(self, hidden_states: Tensor, intermediate_tensors: Any = None, padding_mask: Any = None) -> Any:
        """As Megatron's, which knows a boolean padding mask only and would turn ``RoutedTokens`` into one."""
        shared = self.shared_experts_compute(hidden_states)
        probs, routing_map = self.route(hidden_states, padding_mask)
        routed, probs = self.preprocess(hidden_states, probs, routing_map)
        dispatched, probs = self.dispatch(routed, probs)
        output, bias = self.routed_experts_compute(dispatched, probs)
        return self.postprocess(self.combine(output), shared), bias


class RoutedLayer(TransformerLayer):
    """Megatron's layer, which tells its mixture of experts what the micro-batch says of the tokens."""

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """(hidden states, context), as Megatron's."""
        options["padding_mask"] = options["packed_seq_params"].routed
        return super().forward(*arguments, **options)
