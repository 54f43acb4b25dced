"""Softmax sums over rows of logits, and their gradients, in float32 (float64 for float64 logits).

With truncated sampling, only a row's support counts: the tokens that its token was sampled from. A rank may hold some
columns of the vocabulary; ``VocabularyShard`` combines the ranks' sums.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

RowValues = tuple[Tensor, Tensor, Tensor]
RowGradients = tuple[Tensor, Tensor, Tensor | None]
Sums = tuple[Tensor, Tensor, Tensor]
"""(n,) each: sum of exp(x - max), sum of exp(x - max) (x - max), and the target's logit."""
Reduce = Callable[[Tensor], object]

LEAST_MAXIMUM = torch.finfo(torch.float32).min / 4
"""Maximum of a row in which every token is forbidden: finite, so its sums are 0 and not nan."""

# exp() of this, and of anything below, is 0 even in float64.
_LEAST_SHIFT = -1000.0


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type for computing and accumulating: float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def row_sums(x: Tensor, column: Tensor, overwrite: bool, forbids: bool) -> tuple[Tensor, Sums]:
    """Return per row of (n, V): maximum m, then sum of exp(x - m), sum of exp(x - m) (x - m), and x at ``column``.

    Args:
        overwrite: use the memory of ``x`` as scratch space.
        forbids: ``x`` may have forbidden tokens (-inf), which costs one more pass over the rows.
    """
    target = x.gather(1, column[:, None]).squeeze(1)
    maximum = x.amax(1).clamp_min_(LEAST_MAXIMUM)
    shifted = torch.sub(x, maximum[:, None], out=x if overwrite else None)
    weights = shifted.exp()
    total = weights.sum(1)
    if forbids:  # a forbidden token has weight 0, and the product must be 0 too, not nan
        shifted.clamp_min_(torch.finfo(x.dtype).min)
    return maximum, (total, shifted.mul_(weights).sum(1), target)


def row_slopes(
    softmax: RowValues, grads: RowGradients, temperatures: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return (n,) a, b and t: the gradient of a logit is ``p (a + b (x - m))``, plus t at the target.

    ``d logprob = onehot - p`` and ``d H = -p (log p + H)``; x is the scaled logit, m the row's maximum, and p the
    probability. a, b and t include the division by the temperature. Without a gradient of entropies, b is ``None``.
    """
    _, log_total, entropy = softmax
    grad_logprobs, grad_targets, grad_entropy = grads
    scales = 1.0 if temperatures is None else temperatures.to(log_total.dtype).reciprocal()
    constant = grad_logprobs * -scales
    if grad_entropy is None:
        return constant, None, grad_targets * scales
    slope = grad_entropy * -scales
    return constant - slope * (log_total - entropy), slope, grad_targets * scales


def logit_gradient(
    x: Tensor,
    temperatures: Tensor | None,
    column: Tensor,
    softmax: RowValues,
    grads: RowGradients,
    overwrite: bool,
    forbids: bool,
) -> Tensor:
    """Return the gradient of the unscaled logits, given the (n, V) temperature-scaled logits ``x``.

    The log-sum-exp is split into the maximum and the rest above it. For large logits, their sum would be rounded to a
    multiple of 1e-5 or more, and every probability with it.

    Args:
        column: (n,) of the targets.
        softmax: (n,) maximum, log-sum-exp above it, and entropy, over the whole vocabulary.
        grads: (n,) gradients of all logprobs, of logprobs whose target is one of these columns (else 0), and of
            entropies, if any.
        overwrite: write the result to the memory of ``x``.
        forbids: ``x`` may have forbidden tokens (-inf), which costs one more pass for a gradient of entropies.
    """
    maximum, log_total, _ = softmax
    constant, slope, of_target = row_slopes(softmax, grads, temperatures)
    dx = torch.sub(x, maximum[:, None], out=x if overwrite else None)
    per_weight = (-log_total).exp()  # p = per_weight * exp(shifted), log p = shifted - log_total
    if slope is None:
        dx.exp_().mul_((constant * per_weight)[:, None])
    else:
        weights = dx.exp()
        if forbids:  # a forbidden token has weight 0; its factor has to be finite for any gradient
            dx.clamp_min_(_LEAST_SHIFT)
        dx.mul_((slope * per_weight)[:, None]).add_((constant * per_weight)[:, None]).mul_(weights)
    return dx.scatter_add_(1, column[:, None], of_target[:, None])


def forbid_outside(x: Tensor, supports: Tensor, start: int) -> Tensor:
    """Set logits outside of the supports to -inf, in place, without reading anything back from a device.

    Args:
        x: (n, V) logits of the vocabulary's columns from ``start`` on.
        supports: (n, K) token ids in any order, padded with -1. A row of only -1 is the whole vocabulary.
    """
    columns = supports.long() - start
    is_elsewhere = (columns < 0) | (columns >= x.shape[1]) | (supports < 0)
    allowed = torch.zeros(x.shape[0], x.shape[1] + 1, dtype=torch.bool, device=x.device)
    allowed.scatter_(1, columns.masked_fill(is_elsewhere, x.shape[1]), True)
    is_whole = (supports < 0).all(1, keepdim=True)
    return x.masked_fill_(~(allowed[:, :-1] | is_whole), float("-inf"))


def pad_supports(token_ids: Tensor, sizes: Tensor, tokens: Tensor) -> Tensor:
    """Return the supports of ``tokens``, (n, K) int32 padded with -1, where K is the size of the largest.

    Args:
        token_ids, sizes: ``support_ids`` and ``support_sizes`` of a pack, on the host.
        tokens: (n,) int64 indices into ``sizes``.
    """
    own = sizes[tokens].long()
    columns = torch.arange(max(1, int(own.max())) if len(own) else 1)
    places = (sizes.cumsum(0) - sizes)[tokens][:, None] + columns
    kept = torch.cat([token_ids, token_ids.new_zeros(1)])[places.clamp_max_(len(token_ids))]
    return kept.masked_fill_(columns >= own[:, None], -1)


def are_in(supports: Tensor, tokens: Tensor) -> Tensor:
    """Return (n,) bool, True if the token is in its support."""
    return (supports == tokens[:, None]).any(1) | (supports < 0).all(1)


def no_reduction(tensor: Tensor) -> None:
    """Do nothing: the reduction over a group of one rank."""


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """Columns of the vocabulary that this rank holds, without padding, and a way to walk over tokens.

    Attributes:
        start: global id of the first column.
        columns: number of columns.
        chunk_tokens: tokens of one chunk.
        all_reduce_max, all_reduce_sum: reduce a tensor in place over the ranks that hold the whole vocabulary.
    """

    start: int
    columns: int
    chunk_tokens: int
    all_reduce_max: Reduce = no_reduction
    all_reduce_sum: Reduce = no_reduction

    @classmethod
    def of(
        cls, held_columns: int, start: int, vocab_size: int, chunk_tokens: int, reductions: tuple[Reduce, Reduce]
    ) -> Self:
        """Make the shard of a rank that holds ``held_columns`` from ``start`` on, including padding.

        Raises:
            ValueError: the columns are a part of the vocabulary, but a reduction is missing.
        """
        columns = max(0, min(vocab_size - start, held_columns))
        if columns < vocab_size and no_reduction in reductions:
            raise ValueError(
                f"{columns} columns from {start} on are not the whole vocabulary of {vocab_size}; give all_reduce_max "
                "and all_reduce_sum of the group that holds the others"
            )
        return cls(start, columns, chunk_tokens, *reductions)

    def parts(self, count: int) -> list[slice]:
        """Return chunks of ``count`` tokens; none if this rank holds only padding."""
        if self.columns == 0:
            return []
        return [slice(i, min(i + self.chunk_tokens, count)) for i in range(0, count, self.chunk_tokens)]

    def local(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the column of each target (clamped into the shard), and whether this rank holds it."""
        column = targets - self.start
        held = (column >= 0) & (column < self.columns)
        return column.clamp(0, max(0, self.columns - 1)), held

    def gradients(
        self, targets: Tensor, softmax: Sequence[Tensor], grads: tuple[Tensor | None, ...]
    ) -> Iterator[tuple[slice, tuple[Tensor, RowValues, RowGradients]]]:
        """Yield every chunk of tokens with the last arguments of ``logit_gradient``; nothing without a gradient.

        Args:
            softmax: (N,) maximum, log-sum-exp above it, and entropy.
            grads: (N,) gradients of logprobs and of entropies, if any.
        """
        grad_logprobs, grad_entropy = grads
        if grad_logprobs is None and grad_entropy is None:
            return
        grad = torch.zeros_like(softmax[1]) if grad_logprobs is None else grad_logprobs.masked_fill(targets < 0, 0.0)
        column, held = self.local(targets)
        grad_targets = grad.masked_fill(~held, 0.0)
        for part in self.parts(targets.numel()):
            maximum, log_total, entropy = (each[part] for each in softmax)
            of_entropy = None if grad_entropy is None else grad_entropy[part]
            yield part, (column[part], (maximum, log_total, entropy), (grad[part], grad_targets[part], of_entropy))

    def scores(
        self, targets: Tensor, dtype: torch.dtype, sums_of: Callable[[slice, Tensor], tuple[Tensor, Sums]]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return (N,) maxima, log-sum-exps above them, entropies and target logprobs over the whole vocabulary.

        A negative target has logprob 0 and no gradient. Each reduction is called once, or not at all without targets.

        Args:
            sums_of: computes ``row_sums`` for a slice of tokens and the columns of their targets.
        """
        count = targets.numel()
        # A shard of only padding keeps a finite, very low maximum: its sums stay 0, never 0 * inf.
        local_maximum = torch.full((count,), torch.finfo(dtype).min / 4, dtype=dtype, device=targets.device)
        sums = torch.zeros(3, count, dtype=dtype, device=targets.device)
        if count == 0:
            return sums[0], sums[0], sums[0].clone(), sums[0].clone()
        column, held = self.local(targets)
        for part in self.parts(count):
            local_maximum[part], (sums[0, part], sums[1, part], sums[2, part]) = sums_of(part, column[part])
        sums[2].masked_fill_(~held, 0.0)
        maximum = local_maximum.clone()
        self.all_reduce_max(maximum)
        shift = local_maximum - maximum
        scale = shift.exp()
        sums[1] = scale * (sums[1] + shift * sums[0])
        sums[0] *= scale
        self.all_reduce_sum(sums)
        log_total = sums[0].log()
        logprobs = (sums[2] - maximum - log_total).masked_fill(targets < 0, 0.0)
        return maximum, log_total, log_total - sums[1] / sums[0], logprobs
