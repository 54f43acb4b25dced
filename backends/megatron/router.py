"""Megatron's routers with the balancing loss of ``backends.common.step.balance`` and the replay of ``routes``, and
exchange of routed tokens between the ranks of experts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from backends.common.step.balance import RoutedTokens
from backends.common.step.routes import TokenRoutes
from backends.megatron.conversion.placement import EXPERT_BIAS
from backends.megatron.experts import GroupedExperts
from backends.megatron.versions import set_experts


class _AddLoss(torch.autograd.Function):
    """Identity of ``x`` that adds the scalar ``loss`` to the objective."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], torch.ones((), dtype=torch.float32, device=grads[0].device)


@dataclass(frozen=True, slots=True)
class _LayerReplay:
    """Megatron's interface for replay, of one layer and micro-batch."""

    routes: TokenRoutes
    layer: int

    def get_replay_topk(
        self, scores: Tensor, top_k: int, groups: int | None, top_groups: int | None, choose: Callable[..., Any]
    ) -> tuple[Tensor, Tensor]:
        """Return (t, k) scores and experts; ``choose`` returns the router's own."""
        experts = self.routes.choose(self.layer, choose(scores, top_k, groups, top_groups)[1])
        return scores.gather(1, experts), experts


class BalancedRouter(TopKRouter):
    """Megatron's top-k router, whose probabilities carry the balancing loss if the micro-batch has one.

    A sigmoid router has a bias that affects the choice of experts but not their weights. The trainer moves it
    (``trainer.router_bias_rate``), not Megatron.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        if self.score_function == "sigmoid":
            del self.expert_bias
            zeros = torch.zeros(self.num_experts, dtype=torch.float32, device=self.weight.device)
            self.register_buffer(EXPERT_BIAS, zeros)

    def _apply_expert_bias(self, *arguments: Any, **options: Any) -> None:
        """Skip the load counts for the unused update rule. Megatron's version is compiled, which takes 2 s of a core in
        every rank's first step and, on a CPU, a C++ compiler."""

    def routing(self, logits: Tensor, padding_mask: Any = None) -> tuple[Tensor, Tensor]:
        """Return (t, E) probabilities and routing map. ``padding_mask`` is the micro-batch's ``RoutedTokens`` or None.

        Under full recompute a layer runs twice; the loss counts only the run under autograd.
        """
        tokens: RoutedTokens | None = padding_mask
        routes = None if tokens is None else tokens.routes
        self.router_replay = None if routes is None else _LayerReplay(routes, self.layer_number - 1)
        probs, routing_map = super().routing(logits)
        if tokens is not None and tokens.balance.loads is not None:
            tokens.count(tokens.balance.loads, self.layer_number - 1, routing_map)
        if tokens is None or tokens.balance.loss is None or not torch.is_grad_enabled():
            return probs, routing_map
        flat, sigmoid = logits.view(-1, logits.shape[-1]), self.score_function == "sigmoid"
        loss = tokens.layer_loss(flat, routing_map, sigmoid, self.topk, self.tp_cp_group)
        return _AddLoss.apply(probs, loss), routing_map


class BalancedMoELayer(MoELayer):
    """Megatron's mixture of experts, whose router receives every token's sequence."""

    def __init__(self, *arguments: Any, pg_collection: Any = None, **options: Any) -> None:
        groups = get_default_pg_collection() if pg_collection is None else pg_collection
        super().__init__(*arguments, pg_collection=groups, **options)
        if self.config.moe_token_dispatcher_type == "flex":  # DeepEP's, built by Megatron
            return
        places = (self.num_local_experts, self.local_expert_indices)
        self.token_dispatcher = Dispatcher(*places, config=self.config, pg_collection=groups)
        self.token_dispatcher.serve(self.experts)

    def forward(self, hidden_states: Tensor, intermediate_tensors: Any = None, padding_mask: Any = None) -> Any:
        """Run like Megatron's, which accepts only a boolean padding mask and would convert ``RoutedTokens`` to one."""
        shared = self.shared_experts_compute(hidden_states)
        probs, routing_map = self.route(hidden_states, padding_mask)
        if self.config.moe_token_dispatcher_type == "flex":
            probs = probs.float()  # DeepEP's type, to which Megatron would convert with a warning in every layer
        routed, probs = self.preprocess(hidden_states, probs, routing_map)
        dispatched, probs = self.dispatch(routed, probs)
        output, bias = self.routed_experts_compute(dispatched, probs)
        return self.postprocess(self.combine(output), shared), bias


class RoutedLayer(TransformerLayer):
    """Megatron's layer, which passes the micro-batch's token information to its mixture of experts."""

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """Return (hidden states, context), like Megatron's."""
        options["padding_mask"] = options["packed_seq_params"].routed
        return super().forward(*arguments, **options)


def balance_experts(spec: ModuleSpec, experts: type | None, grouped: bool) -> None:
    """Make a layer's mixture of experts a balanced one, of ``experts``, or else of Megatron's or grouped ones."""
    spec.module = RoutedLayer
    set_experts(spec.submodules, BalancedMoELayer, BalancedRouter, experts or (GroupedExperts if grouped else None))


@dataclass(frozen=True, slots=True)
class Routes:
    """Rows of tokens in the order of experts. Every token has the same number of rows.

    Attributes:
        tokens: (R,) the token of each row.
        rows: (T, R / T) the rows of each token.
    """

    tokens: Tensor
    rows: Tensor

    @classmethod
    def of(cls, tokens: Tensor, per_token: int) -> Self:
        """Create routes from the token of each row."""
        return cls(tokens, tokens.argsort(stable=True).view(-1, per_token))

    def sum_rows(self, rows: Tensor) -> Tensor:
        """Add the (R, H) rows of each token, to (T, H).

        Sums in a fixed order and rounds once. Megatron's ``unpermute`` adds atomically, so a GPU's results would differ
        between runs.
        """
        return rows.index_select(0, self.rows.flatten()).view(*self.rows.shape, -1).sum(1)


class ToExperts(torch.autograd.Function):
    """Expansion of (T, H) tokens to (R, H) rows."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, routes: Routes) -> Tensor:
        ctx.routes = routes
        return hidden.index_select(0, routes.tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.routes.sum_rows(grads[0]), None


class FromExperts(torch.autograd.Function):
    """Sum of (R, H) rows by token, to (T, H)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, routes: Routes) -> Tensor:
        ctx.routes = routes
        return routes.sum_rows(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].index_select(0, ctx.routes.tokens), None


class Dispatcher(MoEAlltoAllTokenDispatcher):
    """Dispatcher of every token to ``moe_router_topk`` experts, so the host knows the number of rows.

    Between ranks, the host must know how many rows go where. Megatron waits for this once per layer in forward.

    Attributes:
        counts_stay: the experts accept their numbers of tokens as a tensor on the device.
    """

    counts_stay = False

    def serve(self, experts: torch.nn.Module) -> None:
        """Dispatch to ``experts``."""
        self.counts_stay = getattr(experts, "counts_stay", False)

    @property
    def _is_alone(self) -> bool:
        return self.ep_size == self.tp_size == 1

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return rows of tokens (..., H) in the order of experts and their probabilities, from the (T, E) inputs."""
        self.hidden_shape, self.probs, self.routing_map = hidden_states.shape, probs, routing_map
        hidden = hidden_states.view(-1, hidden_states.shape[-1])
        counts = self.preprocess(routing_map)
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_1", counts)
        self.hidden_shape_before_permute = hidden.shape
        # Megatron's ``permute`` selects by masks, and the host would wait for their values.
        routes = torch.nonzero_static(routing_map.mT.flatten(), size=self.num_out_tokens).squeeze(1)
        self._routes = Routes.of(routes % len(hidden), self.config.moe_router_topk)
        return ToExperts.apply(hidden, self._routes), probs.mT.flatten().index_select(0, routes)

    def combine_postprocess(self, permutated_local_input_tokens: Tensor) -> Tensor:
        """Return the sum of each token's rows, in the tokens' original shape."""
        combined: Tensor = FromExperts.apply(permutated_local_input_tokens, self._routes)
        return combined.view(self.hidden_shape)

    def dispatch_postprocess(self, global_input_tokens: Tensor, global_probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows in the order of local experts, the number of rows per expert, and the rows' probabilities."""
        if not (self._is_alone and self.counts_stay):
            rows: tuple[Tensor, Tensor, Tensor] = super().dispatch_postprocess(global_input_tokens, global_probs)
            return rows
        counts, self.tokens_per_expert = self.tokens_per_expert, None
        return global_input_tokens, counts, global_probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Return rows in their original order."""
        if self._is_alone and self.counts_stay:
            return hidden_states
        rows: Tensor = super().combine_preprocess(hidden_states)
        return rows

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Any = None) -> Any:
        if self._is_alone and self.counts_stay:
            return tokens_per_expert
        on_host = super()._maybe_dtoh_and_synchronize(point, tokens_per_expert)
        return tokens_per_expert if self.counts_stay else on_host
