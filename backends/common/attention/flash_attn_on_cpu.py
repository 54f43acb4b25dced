"""The part of flash-attn that ring-flash-attn calls, on the CPU: the same two functions, computed by our kernel.

flash-attn exists for CUDA only. These stand-ins take the same arguments, with the same names and meanings. They reject
what the llama3 path never requests: dropout, windows, soft caps, slopes, attention without a mask.

A causal mask is aligned to the last key, as in flash-attn since 2.1: if a segment has more keys than queries, the
queries are its last tokens. Our kernels support masked squares and unmasked rectangles, so such a segment becomes one
of each, merged by the log-sum-exp.
"""

from collections.abc import Sequence
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from backends.common.attention.kernels import CpuFlash, Pairing, Saved, merged_attention
from backends.common.attention.prefixes import Rows, rows_of, segments_of

_CPU = torch.device("cpu")


def flash_attn_modules() -> dict[str, ModuleType]:
    """Return, by name, the modules that the llama3 path imports. They contain only these two functions."""
    package, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
    for function in (_flash_attn_varlen_forward, _flash_attn_varlen_backward):
        setattr(interface, function.__name__, function)
    return {module.__name__: module for module in (package, interface)}


def _flash_attn_varlen_forward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """Return (Tq, H, D) output, (H, Tq) log-sum-exp, and two empty tensors for flash-attn's dropout mask and state."""
    kernel, ((_, keys, pairing), *far) = CpuFlash(), _parts(**options)
    out, lse = kernel.forward(q, k[keys], v[keys], pairing)
    out = out.to(lse.dtype)
    for rows, keys, pairing in far:
        part = kernel.forward(q[rows], k[keys], v[keys], pairing)
        out[rows], lse[:, rows] = merged_attention((out[rows], lse[:, rows]), part)
    return out.to(q.dtype), lse, q.new_empty(0), q.new_empty(0)


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    **options: Any,
) -> None:
    """Write ``dq``, ``dk`` and ``dv``."""
    dq.zero_()
    for rows, keys, pairing in _parts(**options):
        saved = Saved(q[rows], k[keys], v[keys], out[rows], softmax_lse[:, rows].contiguous())
        part, dk[keys], dv[keys] = CpuFlash().backward(dout[rows], saved, pairing)
        dq[rows] += part


def _parts(
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    deterministic: bool = False,
    rng_state: Tensor | None = None,
) -> list[tuple[Rows, Rows, Pairing]]:
    """List query rows with the keys that they see, each key in one part: masked squares, and rectangles of queries with
    the keys before the first of them.

    Arguments are flash-attn's, without the tensors; results are always ``deterministic``.

    Raises:
        NotImplementedError: another kind of attention.
        ValueError: flash-attn would silently read wrong rows or skip some.
    """
    asked = {
        "dropout_p": dropout_p != 0,
        "causal=False": not causal,
        "window_size": (window_size_left, window_size_right) != (-1, -1),
        "softcap": softcap != 0,
        "alibi_slopes": alibi_slopes is not None,
        "return_softmax": return_softmax,
    }
    if wanted := [name for name, is_asked in asked.items() if is_asked]:
        raise NotImplementedError(
            f"flash-attn's {', '.join(wanted)} is not supported on the CPU; use plain causal attention"
        )
    queries, keys = _spans("q", cu_seqlens_q, max_seqlen_q), _spans("k", cu_seqlens_k, max_seqlen_k)
    pairs = [(q, k, len(k) - len(q)) for q, k in zip(queries, keys, strict=True)]
    for q, k, missing in pairs:
        if missing < 0:
            raise ValueError(f"a segment has {len(q)} queries and {len(k)} keys; give at least as many keys as queries")
    parts = [_part(queries, [k[before:] for _, k, before in pairs], True, softmax_scale)]
    far = [(q, k[:before]) for q, k, before in pairs if before]
    if far:
        parts.append(_part([q for q, _ in far], [k for _, k in far], False, softmax_scale))
    return parts


def _part(queries: Sequence[range], keys: Sequence[range], causal: bool, scale: float) -> tuple[Rows, Rows, Pairing]:
    pairing = Pairing(segments_of(queries, _CPU), segments_of(keys, _CPU), causal, scale)
    return rows_of(queries, _CPU), rows_of(keys, _CPU), pairing


def _spans(what: str, cu_seqlens: Tensor, longest: int) -> list[range]:
    spans = [range(*ends) for ends in pairwise(cu_seqlens.tolist())]
    lengths = [len(span) for span in spans]
    if min(lengths) < 1:
        raise ValueError(f"cu_seqlens_{what} has an empty segment; leave empty segments out")
    if max(lengths) > longest:
        raise ValueError(f"max_seqlen_{what}={longest} is less than the longest segment, {max(lengths)}; give that")
    return spans
