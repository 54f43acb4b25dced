"""Supports of truncated sampling: the token ids that a token was drawn from, and logits outside of them forbidden."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Supports:
    """Supports of N tokens, end to end.

    Attributes:
        ids: (K,) int64 token ids, those of the first token first.
        offsets: (N + 1,) int64; token i was drawn from ``ids[offsets[i]:offsets[i + 1]]``, and from the whole
            vocabulary where that is empty.
    """

    ids: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, rows: list[list[int]]) -> Self:
        """From one list of ids for each token."""
        lengths = torch.tensor([0, *map(len, rows)])
        return cls(torch.tensor([token for row in rows for token in row], dtype=torch.int64), lengths.cumsum(0))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def forbid(self, x: Tensor, part: slice, start: int) -> Tensor:
        """Set logits of tokens outside of the supports to -inf, in place.

        Args:
            x: (n, V) logits of the tokens ``part``, of the vocabulary's columns from ``start`` on.
        """
        first, last = part.start, part.start + len(x)
        lengths = self.offsets[first + 1 : last + 1] - self.offsets[first:last]
        rows = torch.arange(len(x), device=x.device).repeat_interleave(lengths)
        columns = self.ids[self.offsets[first] : self.offsets[last]] - start
        held = (columns >= 0) & (columns < x.shape[1])
        allowed = (lengths == 0)[:, None].expand_as(x).clone()
        allowed[rows[held], columns[held]] = True
        return x.masked_fill_(~allowed, float("-inf"))
