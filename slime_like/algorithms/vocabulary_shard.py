"""A rank's columns of the vocabulary, and log-sum-exps over all ranks' columns."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from slime_like.algorithms.softmax import RowGradients, RowValues

Reduce = Callable[[Tensor], object]
Sums = Tensor | tuple[Tensor, Tensor | float, Tensor]
"""(n,) each, or (3, n): sum of exp(x - max), sum of exp(x - max) (x - max), and the target's logit."""


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
