"""The part of flash-attn that ring-flash-attn calls, on the CPU: the same two functions, computed by our own kernel.

flash-attn exists for CUDA only. These stand-ins take the same arguments by the same names and mean the same by them;
what the llama3 path never asks for (dropout, windows, soft caps, slopes, attention without a mask) they refuse.

A causal mask is aligned to the last key, as in flash-attn since 2.1: of a segment with more keys than queries the
queries are the last ones. Our kernels know squares under a mask and rectangles without one, so that such a segment is
one of each, merged by the log-sum-exp.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType
from typing import Any, Self

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
    call, kernel = _Call(**options), CpuFlash()
    split = _Split.of(call)
    near = split.near_keys
    out, lse = kernel.forward(q, k[near], v[near], Pairing(split.queries, split.queries, True, call.softmax_scale))
    if split.far is not None:
        rows, keys = split.far.query_rows, split.far.key_rows
        part = kernel.forward(q[rows], k[keys], v[keys], split.far.pairing(call.softmax_scale))
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
    call, kernel = _Call(**options), CpuFlash()
    split = _Split.of(call)
    near, pairing = split.near_keys, Pairing(split.queries, split.queries, True, call.softmax_scale)
    local = kernel.backward(dout, Saved(q, k[near], v[near], out, softmax_lse), pairing)
    dq.copy_(local[0])
    dk[near], dv[near] = local[1], local[2]
    if split.far is not None:
        rows, keys = split.far.query_rows, split.far.key_rows
        saved = Saved(q[rows], k[keys], v[keys], out[rows], softmax_lse[:, rows].contiguous())
        far = kernel.backward(dout[rows], saved, split.far.pairing(call.softmax_scale))
        dq[rows] = local[0][rows] + far[0]
        dk[keys], dv[keys] = far[1], far[2]


@dataclass(frozen=True, slots=True)
class _Far:
    """Keys before the first query of their segment, and the queries that see all of them."""

    query_rows: Tensor
    queries: Segments
    key_rows: Tensor
    keys: Segments

    @classmethod
    def of(cls, spans: Sequence[tuple[range, range]]) -> Self:
        queries, keys = zip(*spans, strict=True)
        return cls(_rows(queries), _boundaries(queries), _rows(keys), _boundaries(keys))

    def pairing(self, scale: float) -> Pairing:
        return Pairing(self.queries, self.keys, False, scale)


@dataclass(frozen=True, slots=True)
class _Split:
    """Packed causal attention, parted into squares under a mask and rectangles without one.

    Attributes:
        queries: boundaries of the queries.
        near_keys: (Tq,) the last rows of every segment's keys, as many as it has queries.
        far: what remains; ``None`` where every segment has as many keys as queries.
    """

    queries: Segments
    near_keys: Tensor
    far: _Far | None

    @classmethod
    def of(cls, call: _Call) -> Self:
        """Raises ValueError where flash-attn would read wrong rows, or skip some, silently."""
        q_spans, k_spans = (list(pairwise(ends.tolist())) for ends in (call.cu_seqlens_q, call.cu_seqlens_k))
        _require_sound("q", q_spans, call.max_seqlen_q)
        _require_sound("k", k_spans, call.max_seqlen_k)
        near: list[Tensor] = []
        far: list[tuple[range, range]] = []
        for (q_start, q_end), (k_start, k_end) in zip(q_spans, k_spans, strict=True):
            first = k_end - (q_end - q_start)
            if first < k_start:
                raise ValueError(
                    f"a segment has {q_end - q_start} queries and {k_end - k_start} keys; keys must suffice"
                )
            near.append(torch.arange(first, k_end))
            if first > k_start:
                far.append((range(q_start, q_end), range(k_start, first)))
        return cls(Segments.of(call.cu_seqlens_q), torch.cat(near), _Far.of(far) if far else None)


def _rows(spans: Sequence[range]) -> Tensor:
    return torch.cat([torch.arange(span.start, span.stop) for span in spans])


def _boundaries(spans: Sequence[range]) -> Segments:
    return Segments.of(torch.tensor([0, *torch.tensor([len(span) for span in spans]).cumsum(0)], dtype=torch.int32))


def _require_sound(what: str, spans: Sequence[tuple[int, int]], longest: int) -> None:
    lengths = [end - start for start, end in spans]
    if min(lengths) < 1:
        raise ValueError(f"cu_seqlens_{what} has an empty segment; leave empty segments out")
    if max(lengths) > longest:
        raise ValueError(f"max_seqlen_{what}={longest} is less than the longest segment, {max(lengths)}; give that")
