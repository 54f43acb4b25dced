"""Variable-length attention kernels with one signature. Each returns its log-sum-exp, which a ring needs.

Shapes: q (Tq, H, D); k and v (Tk, G, D) with G dividing H (grouped-query attention); out like q; lse (H, Tq) float32.
Through ``kernel_for``, values may have narrower heads than queries and keys; out then has the values' width. Kernels
are plain forward and backward functions; the caller handles autograd.
"""

from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, Protocol, Self

import torch
import torch.nn.attention
from torch import Tensor

from slime_like.checks.packages import FLASH_ATTENTION, is_installed


@dataclass(frozen=True, slots=True)
class Segments:
    """Boundaries of one flat token axis: on the host for loops, on the device for kernels."""

    host: tuple[int, ...]
    device: Tensor
    longest: int

    @classmethod
    def of(cls, cu_seqlens: Tensor) -> Self:
        """Create it from (S+1,) int32 boundaries. Leaves out empty segments."""
        cu_seqlens = torch.unique_consecutive(cu_seqlens)
        host = tuple(cu_seqlens.tolist())
        longest = max((end - start for start, end in pairwise(host)), default=0)
        return cls(host, cu_seqlens, longest)

    def divided(self, parts: int) -> Self:
        """Return the boundaries after keeping 1/parts of every segment. Lengths must be divisible."""
        return type(self)(tuple(value // parts for value in self.host), self.device // parts, self.longest // parts)


@dataclass(frozen=True, slots=True)
class Pairing:
    """Pairs of segments: query segment i attends to key segment i.

    Attributes:
        causal: without a window, requires equal lengths.
        window: most keys that a query sees, including its own. Then ``causal`` is true, and the last query of a
            segment is at its last key.
    """

    q: Segments
    k: Segments
    causal: bool
    scale: float
    window: int | None = None


class Saved(NamedTuple):
    """Inputs and results of a forward pass. In a ring, ``out`` and ``lse`` may cover more keys than ``k`` holds."""

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


class AttentionKernel(Protocol):
    """One implementation of packed attention."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, pairing: Pairing) -> tuple[Tensor, Tensor]:
        """Return (out, lse)."""

    def backward(self, grad: Tensor, saved: Saved, pairing: Pairing) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v."""


_SHORT = 256
"""Segment length, in tokens, up to which the CPU operator's backward is slower in bfloat16 than in float32: five times
as slow at 24 tokens."""


class CpuFlash:
    """torch's flash attention for CPU. Runs in float32, float64 and bfloat16.

    The operator takes batches, not boundaries, so segments of equal length share one call and are read in place if they
    are adjacent. At tens of tokens per sequence, one call per segment would cost more than the arithmetic.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, pairing: Pairing) -> tuple[Tensor, Tensor]:
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        k, v = _repeat_heads(k, q.shape[1]), _repeat_heads(v, q.shape[1])
        precision = torch.float64 if q.dtype == torch.float64 else torch.float32
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=precision)
        for rows, columns in _alike(pairing.q.host, pairing.k.host):
            masked = _masked(pairing, rows, columns, precision)
            part, statistics = op(rows.of(q), columns.of(k), columns.of(v), 0.0, **masked)
            rows.put(out, part)
            rows.put(lse, statistics)
        return out, lse.t().contiguous()

    def backward(self, grad: Tensor, saved: Saved, pairing: Pairing) -> tuple[Tensor, Tensor, Tensor]:
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        dtype, (q, k, v, out, lse) = saved.q.dtype, saved
        if dtype == torch.bfloat16 and max(pairing.q.longest, pairing.k.longest) <= _SHORT:
            grad, q, k, v, out = (x.float() for x in (grad, q, k, v, out))
        groups, statistics = k.shape[1], lse.t()
        k, v = _repeat_heads(k, q.shape[1]), _repeat_heads(v, q.shape[1])
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for rows, columns in _alike(pairing.q.host, pairing.k.host):
            tensors = rows.of(grad), rows.of(q), columns.of(k), columns.of(v), rows.of(out)
            masked = _masked(pairing, rows, columns, statistics.dtype)
            parts = op(*tensors, rows.of(statistics).contiguous(), 0.0, **masked)
            for whole, place, part in zip((dq, dk, dv), (rows, columns, columns), parts, strict=True):
                place.put(whole, part)
        return dq.to(dtype), _sum_heads(dk, groups).to(dtype), _sum_heads(dv, groups).to(dtype)


class CudaFlash:
    """torch's flash attention for CUDA (bfloat16 and float16). Grouped heads are read in place."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, pairing: Pairing) -> tuple[Tensor, Tensor]:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *_boundaries(pairing), 0.0, pairing.causal, False, **_window(pairing)
        )
        return out, lse

    def backward(self, grad: Tensor, saved: Saved, pairing: Pairing) -> tuple[Tensor, Tensor, Tensor]:
        # Without dropout the random state is never read, but the operator still requires its two tensors.
        unused = torch.zeros(2, dtype=torch.uint64, device=grad.device)
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grad, *saved, *_boundaries(pairing), 0.0, pairing.causal, unused, unused[:0], **_window(pairing)
        )
        return dq, dk, dv


def _boundaries(pairing: Pairing) -> tuple[Tensor, Tensor, int, int]:
    return pairing.q.device, pairing.k.device, pairing.q.longest, pairing.k.longest


def _window(pairing: Pairing) -> dict[str, Any]:
    sides = {} if pairing.window is None else {"window_size_left": pairing.window - 1, "window_size_right": 0}
    return {"scale": pairing.scale, **sides}


class NarrowValues:
    """Wrapper that lets a kernel for heads of one width take narrower values. Zero padding doesn't change results."""

    def __init__(self, kernel: AttentionKernel) -> None:
        self._kernel = kernel

    def forward(self, q: Tensor, k: Tensor, v: Tensor, pairing: Pairing) -> tuple[Tensor, Tensor]:
        out, lse = self._kernel.forward(q, k, _as_wide(v, q), pairing)
        return out[..., : v.shape[-1]], lse

    def backward(self, grad: Tensor, saved: Saved, pairing: Pairing) -> tuple[Tensor, Tensor, Tensor]:
        grad, v, out = (_as_wide(x, saved.q) for x in (grad, saved.v, saved.out))
        dq, dk, dv = self._kernel.backward(grad, saved._replace(v=v, out=out), pairing)
        return dq, dk, dv[..., : saved.v.shape[-1]]


def _as_wide(x: Tensor, like: Tensor) -> Tensor:
    missing = like.shape[-1] - x.shape[-1]
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def choose_flash_attention(setting: str, capability: tuple[int, int]) -> None:
    """Let torch's flash attention run FlashAttention 3 or 4 in this process (``trainer.attention_kernels``).

    With low-rank factors, windows or latent attention, layers use these kernels even if Transformer Engine is
    installed. FlashAttention 2 reaches about half of Hopper's speed.
    """
    has_fa3 = capability[0] == 9 and is_installed(FLASH_ATTENTION["fa3"])
    name = ("fa3" if has_fa3 else "torch") if setting == "auto" else setting
    if name != "torch":
        torch.nn.attention.activate_flash_attention_impl(name.upper())


@cache
def kernel_for(device_type: str) -> AttentionKernel:
    """Return torch's flash attention for this kind of device.

    Shapes ("meta") represent tensors on CUDA.
    """
    return NarrowValues(CudaFlash() if device_type in ("cuda", "meta") else CpuFlash())


@dataclass(frozen=True, slots=True)
class _Rows:
    """Tokens of several segments of one length: a slice of the flat axis if they are adjacent, else an index."""

    where: slice | Tensor
    length: int

    @classmethod
    def of_segments(cls, starts: list[int], length: int) -> Self:
        if starts == list(range(starts[0], starts[0] + len(starts) * length, length)):
            return cls(slice(starts[0], starts[-1] + length), length)
        return cls((torch.tensor(starts)[:, None] + torch.arange(length)).flatten(), length)

    def of(self, x: Tensor) -> Tensor:
        """Reshape (T, heads, ...) to (segments, heads, length, ...)."""
        return x[self.where].unflatten(0, (-1, self.length)).transpose(1, 2)

    def put(self, whole: Tensor, part: Tensor) -> None:
        """Write (segments, heads, length, ...) into its rows of ``whole`` (T, heads, ...)."""
        whole[self.where] = part.transpose(1, 2).flatten(0, 1)


@lru_cache(maxsize=64)  # all layers of a micro-batch ask for the same groups, forward and backward
def _alike(q_boundaries: tuple[int, ...], k_boundaries: tuple[int, ...]) -> list[tuple[_Rows, _Rows]]:
    """Group segments by query length and key length; return each group's queries and keys."""
    starts: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
    pairs = zip(pairwise(q_boundaries), pairwise(k_boundaries), strict=True)
    for (q_start, q_end), (k_start, k_end) in pairs:
        pair = starts.setdefault((q_end - q_start, k_end - k_start), ([], []))
        pair[0].append(q_start)
        pair[1].append(k_start)
    return [
        (_Rows.of_segments(q_starts, q_length), _Rows.of_segments(k_starts, k_length))
        for (q_length, k_length), (q_starts, k_starts) in starts.items()
    ]


def _masked(pairing: Pairing, rows: _Rows, columns: _Rows, dtype: torch.dtype) -> dict[str, Any]:
    """Return the CPU operator's arguments that say which keys a query sees."""
    if pairing.window is None or rows.length == columns.length <= pairing.window:
        return {"is_causal": pairing.causal, "scale": pairing.scale}
    mask = _window_mask(rows.length, columns.length, pairing.window, dtype)
    return {"is_causal": False, "scale": pairing.scale, "attn_mask": mask}


@lru_cache(maxsize=8)
def _window_mask(queries: int, keys: int, window: int, dtype: torch.dtype) -> Tensor:
    """Return (queries, keys) summands of scores: 0 for the keys that a query sees, else minus infinity."""
    seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries).triu(keys - queries - window + 1)
    return torch.zeros(queries, keys, dtype=dtype).masked_fill(~seen, -torch.inf)


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _sum_heads(x: Tensor, groups: int) -> Tensor:
    return x if x.shape[1] == groups else x.view(x.shape[0], groups, -1, x.shape[2]).sum(2)


def merge_attention(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the softmax-weighted mean of two partial results over the same queries, in the precision of their lse.

    Each is (out, lse).
    """
    total = torch.logaddexp(one[1], other[1])
    shares = ((out, (lse - total).exp().transpose(0, 1).unsqueeze(-1)) for out, lse in (one, other))
    ours, theirs = (out.to(total.dtype) * share for out, share in shares)
    return ours + theirs, total
