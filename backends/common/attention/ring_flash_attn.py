"""The llama3-style path of the package ring-flash-attn: contiguous parts of a pack, keys and values gathered by head.

The package is used unchanged. Its module-level globals and defaults (no mask, the whole world) are never relied on:
boundaries come with the micro-batch; mask, scale and process group with every call. It gathers ``heads_k_stride`` heads
of keys and values at a time, and overlaps the next gather with computation.
"""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from types import ModuleType
from typing import Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from backends.common.attention.flash_attn_on_cpu import flash_attn_modules
from backends.common.attention.packed_attention import unsupported
from slime_like.errors import TrainerError

PACKAGE = "ring_flash_attn"


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

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        """Compute (T, H, D) outputs from the local tokens' (T, H, D) queries and (T, G, D) keys and values.

        Raises:
            TrainerError: there are sinks, or a sequence is longer than the window.
        """
        segments, width = self.segments, v.shape[-1]
        if sinks is not None or (window is not None and segments.max_seqlen_k > window):
            raise unsupported(f"attention {PACKAGE}", "sinks and sliding windows")
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
    stand_ins = {} if device_type == "cuda" else flash_attn_modules()
    bare = ModuleType(PACKAGE)
    bare.__path__ = list(package.submodule_search_locations or ())
    with _private_imports({PACKAGE: bare, **stand_ins}):
        return importlib.import_module(f"{PACKAGE}.llama3_flash_attn_varlen")


@contextlib.contextmanager
def _private_imports(modules: dict[str, ModuleType]) -> Iterator[None]:
    """Let imports find ``modules``; afterwards, forget everything imported below their names."""
    roots = {name.partition(".")[0] for name in modules}

    def taken_out() -> dict[str, ModuleType]:
        return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in roots}

    before = taken_out()
    sys.modules.update(modules)
    try:
        yield
    finally:
        taken_out()
        sys.modules.update(before)
