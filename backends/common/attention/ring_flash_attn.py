"""The llama3-style path of the package ring-flash-attn: contiguous parts of a pack, keys and values gathered by head.

The package is used unchanged. Its module-level globals and defaults (no mask, the whole world) are never relied on:
boundaries come with the micro-batch; mask, scale and process group with every call. It gathers ``heads_k_stride`` heads
of keys and values at a time, and overlaps the next gather with computation.

The package calls two functions of flash-attn, which exists for CUDA only. On the CPU, stand-ins compute them by our
kernel. They take the same arguments, with the same names and meanings. They reject what the llama3 path never requests:
dropout, windows, soft caps, slopes, attention without a mask. A causal mask is aligned to the last key, as in
flash-attn since 2.1: if a segment has more keys than queries, the queries are its last tokens. Our kernels support
masked squares and unmasked rectangles, so such a segment becomes one of each, merged by the log-sum-exp.
"""

import contextlib
import importlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from types import ModuleType
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from backends.common.attention.kernels import CpuFlash, Pairing, Saved, merge_attention
from backends.common.attention.packed_attention import unsupported_error
from backends.common.attention.prefixes import Rows, rows_of, segments_of
from slime_like.errors import TrainerError

PACKAGE = "ring_flash_attn"
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Llama3Segments:
    """Boundaries in one rank's contiguous part of a pack, in the package's form: int32, and the longest length of each.

    Queries are the part's sequences, or pieces of them. ``cu_seqlens_k`` counts the keys they see from the first
    sequence's start, and ``keys`` is their slice of the whole axis.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    keys: slice

    @classmethod
    def of(cls, cu_seqlens_padded: Tensor, rank: int, size: int) -> Self:
        """Create it from (S+1,) int32 boundaries of the whole pack, whose length is a multiple of ``size``."""
        prepare = llama3_module(cu_seqlens_padded.device.type).llama3_flash_attn_prepare_cu_seqlens
        # Drop empty segments: the package finds the part's first and last segments by bisection.
        return cls(*prepare(torch.unique_consecutive(cu_seqlens_padded), True, rank, size))


@dataclass(frozen=True, slots=True)
class RingFlashAttention:
    """Attention of a contiguous part of the pack. Differentiable, with the package's backward pass.

    The package gathers keys and values in one buffer, so values narrower than keys are padded with zeros.

    Attributes:
        group: ranks that hold the other parts.
        heads_k_stride: heads of k and v gathered together; must divide their number. One uses the least memory.
    """

    segments: Llama3Segments
    group: dist.ProcessGroup
    heads_k_stride: int = 1

    @classmethod
    def of(cls, boundaries: Tensor, group: dist.ProcessGroup) -> Self:
        """Return the attention of this rank's part of a pack with these padded boundaries."""
        return cls(Llama3Segments.of(boundaries, group.rank(), group.size()), group)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        """Compute (T, H, D) outputs from the local tokens' (T, H, D) queries and (T, G, D) keys and values.

        Raises:
            TrainerError: there are sinks, or a sequence is longer than the window.
        """
        segments, width = self.segments, v.shape[-1]
        if sinks is not None or (window is not None and segments.max_seqlen_k > window):
            raise unsupported_error(f"attention {PACKAGE}", "sinks and sliding windows")
        out: Tensor = llama3_module(q.device.type).llama3_flash_attn_varlen_func(
            *(q, k, F.pad(v, (0, k.shape[-1] - width))),
            *(segments.cu_seqlens_q, segments.cu_seqlens_k, segments.max_seqlen_q, segments.max_seqlen_k),
            heads_k_stride=self.heads_k_stride,
            local_k_slice=segments.keys,
            dropout_p=0.0,
            softmax_scale=scale,
            causal=True,
            window_size=(-1, -1),
            group=self.group,
        )
        return out[..., :width]


@cache
def llama3_module(device_type: str) -> ModuleType:
    """Return the package's module for this kind of device: over flash-attn on CUDA, over our kernel on the CPU.

    This is a private copy of the module. The package's ``__init__`` cannot run: it imports every form of ring
    attention, and an adapter that is incompatible with transformers 5.

    Raises:
        TrainerError: the package is missing.
    """
    package = find_spec(PACKAGE)
    if package is None:
        raise TrainerError(
            f"trainer.attention={PACKAGE} needs a package that is not installed",
            code="attention-package-missing",
            remedy="pip install ring-flash-attn==0.1.8, or use trainer.attention=ring or allgather",
        )
    modules = {PACKAGE: ModuleType(PACKAGE)}
    modules[PACKAGE].__path__ = list(package.submodule_search_locations or ())
    if device_type != "cuda":  # the modules that the llama3 path imports, with only these two functions
        modules |= {name: ModuleType(name) for name in ("flash_attn", "flash_attn.flash_attn_interface")}
        for function in (_flash_attn_varlen_forward, _flash_attn_varlen_backward):
            setattr(modules["flash_attn.flash_attn_interface"], function.__name__, function)
    with _import_privately(modules):
        return importlib.import_module(f"{PACKAGE}.llama3_flash_attn_varlen")


@contextlib.contextmanager
def _import_privately(modules: dict[str, ModuleType]) -> Iterator[None]:
    """Let imports find ``modules``; afterwards, forget everything imported below their names."""
    roots = {name.partition(".")[0] for name in modules}

    def take_out() -> dict[str, ModuleType]:
        return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in roots}

    before = take_out()
    sys.modules.update(modules)
    try:
        yield
    finally:
        take_out()
        sys.modules.update(before)


def _flash_attn_varlen_forward(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """Return (Tq, H, D) output, (H, Tq) log-sum-exp, and two empty tensors for flash-attn's dropout mask and state."""
    kernel, ((_, keys, pairing), *far) = CpuFlash(), _parts(**options)
    out, lse = kernel.forward(q, k[keys], v[keys], pairing)
    out = out.to(lse.dtype)
    for rows, keys, pairing in far:
        part = kernel.forward(q[rows], k[keys], v[keys], pairing)
        out[rows], lse[:, rows] = merge_attention((out[rows], lse[:, rows]), part)
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

    Arguments are flash-attn's, without the tensors; results are always ``deterministic``. The longest lengths are not
    needed.

    Raises:
        NotImplementedError: another kind of attention.
    """
    windows = (window_size_left, window_size_right) != (-1, -1)
    if dropout_p or softcap or windows or alibi_slopes is not None or return_softmax or not causal:
        raise NotImplementedError("on the CPU, only flash-attn's plain causal attention is supported")
    queries, keys = ([range(*ends) for ends in pairwise(each.tolist())] for each in (cu_seqlens_q, cu_seqlens_k))
    pairs = [(q, k, len(k) - len(q)) for q, k in zip(queries, keys, strict=True)]
    parts = [_part(queries, [k[before:] for _, k, before in pairs], True, softmax_scale)]
    far = [(q, k[:before]) for q, k, before in pairs if before]
    if far:
        parts.append(_part([q for q, _ in far], [k for _, k in far], False, softmax_scale))
    return parts


def _part(queries: Sequence[range], keys: Sequence[range], causal: bool, scale: float) -> tuple[Rows, Rows, Pairing]:
    pairing = Pairing(segments_of(queries, _CPU), segments_of(keys, _CPU), causal, scale)
    return rows_of(queries, _CPU), rows_of(keys, _CPU), pairing
