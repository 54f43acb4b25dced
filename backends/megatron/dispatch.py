"""Megatron's dispatcher of tokens to experts, which waits for the device only where ranks exchange tokens."""

from dataclasses import dataclass
from typing import Any, Self

import torch
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from backends.megatron.experts import GroupedExperts


@dataclass(frozen=True, slots=True)
class Routes:
    """Rows of tokens in the order of experts; every token has equally many.

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

    def summed(self, rows: Tensor) -> Tensor:
        """Add the (R, H) rows of each token, to (T, H).

        In a fixed order and rounded once. Megatron's ``unpermute`` adds atomically, so that a GPU's results would
        differ from run to run.
        """
        return rows.index_select(0, self.rows.flatten()).view(*self.rows.shape, -1).sum(1)


class ToExperts(torch.autograd.Function):
    """(T, H) tokens to (R, H) rows."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, routes: Routes) -> Tensor:
        ctx.routes = routes
        return hidden.index_select(0, routes.tokens)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.routes.summed(grads[0]), None


class FromExperts(torch.autograd.Function):
    """(R, H) rows to the sums of each token's, (T, H)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, routes: Routes) -> Tensor:
        ctx.routes = routes
        return routes.summed(rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].index_select(0, ctx.routes.tokens), None


class Dispatcher(MoEAlltoAllTokenDispatcher):
    """Every token goes to ``moe_router_topk`` experts, so that the host knows how many rows there are.

    Between ranks the host has to know how many go where; Megatron waits for that once in a layer's forward pass.

    Attributes:
        counts_stay: the experts take their numbers of tokens as a tensor on the device.
    """

    counts_stay = False

    def serve(self, experts: torch.nn.Module) -> None:
        """Dispatch to ``experts``."""
        self.counts_stay = isinstance(experts, GroupedExperts)

    @property
    def _is_alone(self) -> bool:
        return self.ep_size == self.tp_size == 1

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Rows of tokens (..., H) in the order of experts, and their probabilities, by (T, E) map and probabilities."""
        self.hidden_shape, self.probs, self.routing_map = hidden_states.shape, probs, routing_map
        hidden = hidden_states.view(-1, hidden_states.shape[-1])
        counts = self.preprocess(routing_map)
        self.tokens_per_expert = self._maybe_dtoh_and_synchronize("before_permutation_1", counts)
        self.hidden_shape_before_permute = hidden.shape
        # Megatron's ``permute`` selects by masks, whose entries the host would wait for.
        routes = torch.nonzero_static(routing_map.mT.flatten(), size=self.num_out_tokens).squeeze(1)
        self._routes = Routes.of(routes % len(hidden), self.config.moe_router_topk)
        return ToExperts.apply(hidden, self._routes), probs.mT.flatten().index_select(0, routes)

    def combine_postprocess(self, permutated_local_input_tokens: Tensor) -> Tensor:
        """Sums of each token's rows, in the shape in which the tokens came."""
        combined: Tensor = FromExperts.apply(permutated_local_input_tokens, self._routes)
        return combined.view(self.hidden_shape)

    def dispatch_postprocess(self, global_input_tokens: Tensor, global_probs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rows in the order of local experts, number of each one's, and probabilities of the rows."""
        if not (self._is_alone and self.counts_stay):
            rows: tuple[Tensor, Tensor, Tensor] = super().dispatch_postprocess(global_input_tokens, global_probs)
            return rows
        counts, self.tokens_per_expert = self.tokens_per_expert, None
        return global_input_tokens, counts, global_probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Rows in the order in which they came."""
        if self._is_alone and self.counts_stay:
            return hidden_states
        rows: Tensor = super().combine_preprocess(hidden_states)
        return rows

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Any = None) -> Any:
        if self._is_alone and self.counts_stay:
            return tokens_per_expert
        on_host = super()._maybe_dtoh_and_synchronize(point, tokens_per_expert)
        return tokens_per_expert if self.counts_stay else on_host
