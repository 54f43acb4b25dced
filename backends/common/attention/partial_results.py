"""Attention over some of the keys and over others, put together."""

import torch
from torch import Tensor


def merged_attention(
    accumulated: tuple[Tensor, Tensor] | None, part: tuple[Tensor, Tensor], rows: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Softmax-weighted mean of two partial results (out, lse) over the same queries, in the precision of the lse.

    ``part`` covers the queries ``rows`` of ``accumulated`` (none: all of them).
    """
    part_out, part_lse = part[0].to(part[1].dtype), part[1]
    if accumulated is None:
        return part_out, part_lse
    out, lse = accumulated
    old_lse = lse if rows is None else lse.index_select(1, rows)
    new_lse = torch.logaddexp(old_lse, part_lse)
    old_out = out if rows is None else out.index_select(0, rows)
    merged = old_out * _weight(old_lse, new_lse) + part_out * _weight(part_lse, new_lse)
    if rows is None:
        return merged, new_lse
    return out.index_copy(0, rows, merged), lse.index_copy(1, rows, new_lse)


def _weight(lse: Tensor, total: Tensor) -> Tensor:
    return (lse - total).exp().transpose(0, 1).unsqueeze(-1)
