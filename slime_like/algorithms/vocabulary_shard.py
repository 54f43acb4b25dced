"""A rank's columns of the vocabulary, and log-sum-exps over the columns of all ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from slime_like.algorithms.softmax import row_sums
from slime_like.algorithms.tensor_checks import require_targets

Reduce = Callable[[Tensor], object]


def no_reduction(tensor: Tensor) -> None:
    """The reduction of a group of one rank."""


class VocabularyShard:
    """Columns of the vocabulary that this rank holds, padding excluded, and how to walk over tokens."""

    def __init__(self, start: int, columns: int, chunk_tokens: int) -> None:
        self.start, self.columns, self.chunk_tokens = start, columns, chunk_tokens

    @classmethod
    def of(cls, targets: Tensor, held_columns: int, start: int, vocab_size: int, chunk_tokens: int) -> VocabularyShard:
        """The shard of a rank that holds ``held_columns`` from ``start`` on, padding included.

        Raises:
            ValueError: targets that are no integers or outside the vocabulary, no vocabulary, a first column below 0, a
                chunk below 1.
        """
        if start < 0:
            raise ValueError(f"vocab_start={start} is no token's id; give that of the first column")
        if chunk_tokens < 1:
            raise ValueError(f"chunk_tokens={chunk_tokens} holds no token; give 1 or more")
        if vocab_size < 1:
            raise ValueError(f"vocab_size={vocab_size} must be the number of tokens, above 0")
        require_targets(targets)
        if targets.numel() and (int(targets.min()) < 0 or int(targets.max()) >= vocab_size):
            raise ValueError(
                f"targets reach from {int(targets.min())} to {int(targets.max())}, the vocabulary from 0 to "
                f"{vocab_size - 1}; give the token's own id where it is masked"
            )
        return cls(start, max(0, min(vocab_size - start, held_columns)), chunk_tokens)

    def require_reductions(self, vocab_size: int, all_reduce_max: Reduce, all_reduce_sum: Reduce) -> None:
        """Raises ``ValueError`` for a part of the vocabulary that would be taken for the whole."""
        if self.columns < vocab_size and no_reduction in (all_reduce_max, all_reduce_sum):
            raise ValueError(
                f"{self.columns} columns from {self.start} on are not the whole vocabulary of {vocab_size}; give "
                "all_reduce_max and all_reduce_sum of the group that holds the others"
            )

    def parts(self, count: int) -> list[slice]:
        return [slice(i, min(i + self.chunk_tokens, count)) for i in range(0, count, self.chunk_tokens)]

    def local(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Column of each target (clamped into the shard), and whether this rank holds it."""
        column = targets - self.start
        held = (column >= 0) & (column < self.columns)
        return column.clamp(0, max(0, self.columns - 1)), held


def local_sums(
    shard: VocabularyShard,
    targets: Tensor,
    dtype: torch.dtype,
    sums_of: Callable[[slice, Tensor], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """(N,) maxima of this rank's logits, and (3, N): sum of exp(x - max), of exp(x - max)(x - max), target logit.

    ``sums_of`` gives both for a slice of tokens and the columns of their targets, as ``chunk_sums``.
    """
    count = targets.numel()
    # A shard that is all padding keeps a finite, very low maximum: its sums are 0 and stay 0, never 0 * inf.
    maximum = torch.full((count,), torch.finfo(dtype).min / 4, dtype=dtype, device=targets.device)
    sums = torch.zeros(3, count, dtype=dtype, device=targets.device)
    if shard.columns == 0:
        return maximum, sums
    for part in shard.parts(count):
        column, held = shard.local(targets[part])
        maximum[part], sums[:, part] = sums_of(part, column)
        sums[2, part].masked_fill_(~held, 0.0)
    return maximum, sums


def chunk_sums(x: Tensor, column: Tensor, overwrite: bool = True) -> tuple[Tensor, Tensor]:
    """(n,) maxima and (3, n) sums of temperature-scaled logits (n, V), which may be overwritten."""
    target = x.gather(1, column[:, None]).squeeze(1)
    maximum, total, product = row_sums(x, overwrite)
    return maximum, torch.stack((total, product, target))


def combine_shards(
    local_maximum: Tensor, sums: Tensor, all_reduce_max: Reduce, all_reduce_sum: Reduce
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Maximum and what the log-sum-exp is above it, entropy and target logprob over all shards.

    From each shard's sums relative to its own maximum.
    """
    maximum = local_maximum.clone()
    all_reduce_max(maximum)
    shift = local_maximum - maximum
    scale = shift.exp()
    sums[1] = scale * (sums[1] + shift * sums[0])
    sums[0] *= scale
    all_reduce_sum(sums)
    log_total = sums[0].log()
    return maximum, log_total, log_total - sums[1] / sums[0], sums[2] - maximum - log_total
