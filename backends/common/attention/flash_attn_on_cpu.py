"""The part of flash-attn that ring-flash-attn calls, on the CPU: the same two functions, computed by our own kernel.

flash-attn exists for CUDA only. These stand-ins take the same arguments by the same names and mean the same by them;
what the llama3 path never asks for (dropout, windows, soft caps, slopes, attention without a mask) they refuse.

A causal mask is aligned to the last key, as in flash-attn since 2.1: of a segment with more keys than queries the
queries are the last ones. Our kernels know squares under a mask and rectangles without one, so that such a segment is
one of each, merged by the log-sum-exp.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from types import ModuleType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from backends.common.attention.kernels import CpuFlash, Pairing, Saved, Segments, merged_attention


def flash_attn_modules() -> dict[str, ModuleType]:
    """By name, the modules that the llama3 path's import looks for; they hold these two functions and nothing else."""
    package, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
    for function in (_flash_attn_varlen_forward, _flash_attn_varlen_backward):
        setattr(interface, function.__name__, function)
    return {module.__name__: module for module in (package, interface)}


@dataclass(frozen=True, slots=True)
class _Call:
    """Arguments of flash-attn's functions beside their tensors. ``deterministic`` asks for nothing: this always is."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    dropout_p: float
    softmax_scale: float
    causal: bool
    window_size_left: int = -1
    window_size_right: int = -1
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    return_softmax: bool = False
    deterministic: bool = False
    rng_state: Tensor | None = None

    def __post_init__(self) -> None:
        asked = {
            "dropout_p": self.dropout_p != 0,
            "causal=False": not self.causal,
            "window_size": (self.window_size_left, self.window_size_right) != (-1, -1),
            "softcap": self.softcap != 0,
            "alibi_slopes": self.alibi_slopes is not None,
            "return_softmax": self.return_softmax,
        }
        if wanted := [name for name, is_asked in asked.items() if is_asked]:
            raise NotImplementedError(
                f"flash-attn's {', '.join(wanted)} has no stand-in on the CPU; only plain causal attention has"
            )


def _flash_attn_varlen_forward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """(Tq, H, D) output, (H, Tq) log-sum-exp, and two empty tensors where flash-attn has dropout's mask and state."""
    kernel, (near, *far) = CpuFlash(), _parts(_Call(**options))
    out, lse = kernel.forward(q, k[near.keys], v[near.keys], near.pairing)
    for rows, keys, pairing in far:
        part = kernel.forward(q[rows], k[keys], v[keys], pairing)
        out, lse = merged_attention((out.to(lse.dtype), lse), part, rows)
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
    """Writes ``dq``, ``dk`` and ``dv``."""
    dq.zero_()
    for rows, keys, pairing in _parts(_Call(**options)):
        saved = Saved(q[rows], k[keys], v[keys], out[rows], softmax_lse[:, rows].contiguous())
        part, dk[keys], dv[keys] = CpuFlash().backward(dout[rows], saved, pairing)
        dq[rows] += part


class _Part(NamedTuple):
    """Rows of queries and of the keys that they see, every key in one part."""

    rows: Tensor
    keys: Tensor
    pairing: Pairing

    @classmethod
    def of(cls, queries: Sequence[range], keys: Sequence[range], causal: bool, scale: float) -> Self:
        return cls(_rows(queries), _rows(keys), Pairing(_boundaries(queries), _boundaries(keys), causal, scale))


def _parts(call: _Call) -> list[_Part]:
    """Squares under a mask, and rectangles of queries with the keys before the first of them.

    Raises:
        ValueError: flash-attn would read wrong rows, or skip some, silently.
    """
    queries, keys = (
        [range(*ends) for ends in pairwise(boundaries.tolist())]
        for boundaries in (call.cu_seqlens_q, call.cu_seqlens_k)
    )
    _require_sound("q", queries, call.max_seqlen_q)
    _require_sound("k", keys, call.max_seqlen_k)
    spans = [(q, k, len(k) - len(q)) for q, k in zip(queries, keys, strict=True)]
    for q, k, missing in spans:
        if missing < 0:
            raise ValueError(f"a segment has {len(q)} queries and {len(k)} keys; keys must suffice")
    parts = [_Part.of(queries, [k[before:] for _, k, before in spans], True, call.softmax_scale)]
    far = [(q, k[:before]) for q, k, before in spans if before]
    if far:
        parts.append(_Part.of([q for q, _ in far], [k for _, k in far], False, call.softmax_scale))
    return parts


def _rows(spans: Sequence[range]) -> Tensor:
    return torch.cat([torch.arange(span.start, span.stop) for span in spans])


def _boundaries(spans: Sequence[range]) -> Segments:
    return Segments.of(torch.tensor([0, *accumulate(map(len, spans))], dtype=torch.int32))


def _require_sound(what: str, spans: Sequence[range], longest: int) -> None:
    lengths = [len(span) for span in spans]
    if min(lengths) < 1:
        raise ValueError(f"cu_seqlens_{what} has an empty segment; leave empty segments out")
    if max(lengths) > longest:
        raise ValueError(f"max_seqlen_{what}={longest} is less than the longest segment, {max(lengths)}; give that")
