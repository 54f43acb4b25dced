"""Supports of truncated sampling: the tokens that each token was sampled from."""

import torch
from torch import Tensor


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


def padded(token_ids: Tensor, sizes: Tensor, tokens: Tensor) -> Tensor:
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
