"""Megatron's token dispatcher to experts, which waits for the device only if ranks exchange tokens."""

from dataclasses import dataclass
from typing import Any, Self

import torch
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor


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

    def summed(self, rows: Tensor) -> Tensor:
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
        return ctx.routes.summed(grads[0]), None


class FromExperts(torch.autograd.Function):
    """Sum of (R, H) rows by token, to (T, H)."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, routes: Routes) -> Tensor:
        ctx.routes = routes
        return routes.summed(rows)

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
