"""Matrix products in float32 by oneDNN, on processors where torch's own choice of a library holds back.

torch gives them to MKL, which uses AVX-512 on Intel's processors only: on others its code for AVX2 does 80 GFLOP/s on a
core of an AMD EPYC 9005 where oneDNN, which torch ships too, does 200. Both round in float32. torch has no switch
between them.
"""

import warnings
from functools import cache, reduce
from typing import Any

import torch
from torch import Tensor

_LEAST_PRODUCTS = 2**20
"""Multiplications below which what a call costs decides."""
_INNER_BLOCK = 1024
"""Of factors of which neither lies in rows: what is put in order at once stays in the cache."""


def pays_here() -> bool:
    """Return whether this processor has AVX-512 and MKL does not use it."""
    capabilities = torch.cpu.get_capabilities()
    wide = bool(capabilities.get("avx512_f")) and not str(capabilities.get("cpu_name", "Intel")).startswith("Intel")
    return wide and torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()


@cache
def use_onednn() -> tuple[object, ...]:
    """Let torch compute large float32 products of matrices on the CPU by oneDNN from now on, where it pays.

    For this process, autograd's own products included, whatever library's module asks for them. May be called again.

    Returns:
        What must live as long as that holds; nothing where torch's own choice is kept.
    """
    return replaced_products() if pays_here() else ()


def replaced_products() -> tuple[object, ...]:
    """The same on any processor whose torch has oneDNN. It ends when what is returned does."""
    library = torch.library.Library("aten", "IMPL")
    own_mm, own_addmm = (torch.library.get_kernel(f"aten::{name}", "CPU") for name in ("mm", "addmm"))

    def mm(keys: Any, a: Tensor, b: Tensor) -> Tensor:
        return product(a, b) if _is_large(a, b) else own_mm.call_boxed(keys, a, b)

    def addmm(keys: Any, bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        plain = beta == alpha == 1 and bias.dtype == torch.float32 and bias.shape == b.shape[1:]
        if plain and _is_large(a, b):
            return product(a, b).add_(bias)
        return own_addmm.call_boxed(keys, bias, a, b, beta=beta, alpha=alpha)

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")  # that they are replaced
        library.impl("mm", mm, "CPU", with_keyset=True)
        library.impl("addmm", addmm, "CPU", with_keyset=True)
    return (library,)


def _is_large(a: Tensor, b: Tensor) -> bool:
    return (
        a.dtype == b.dtype == torch.float32
        and a.shape[0] * b.numel() >= _LEAST_PRODUCTS
        and a.ndim == b.ndim == 2
        and a.shape[1] == b.shape[0]
    )


def product(a: Tensor, b: Tensor) -> Tensor:
    """(M, K) times (K, N), contiguous.

    oneDNN reads one factor row by row, the other in any order. Where neither lies in rows, the smaller one is copied,
    in blocks where K is long, as in a weight's gradient.
    """
    if a.is_contiguous():
        return _linear(a, b.t())
    if b.t().is_contiguous():
        return _linear(b.t(), a).t().contiguous()
    if a.numel() > b.numel():
        return _blocks(b.t(), a.t()).t().contiguous()
    return _blocks(a, b)


def _blocks(a: Tensor, b: Tensor) -> Tensor:
    """The same, with ``a`` copied into rows, of a long K one block that stays in the cache after the other."""
    pairs = zip(a.split(_INNER_BLOCK, dim=1), b.split(_INNER_BLOCK), strict=True)
    return reduce(Tensor.add_, (_linear(left.contiguous(), right.t()) for left, right in pairs))


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight.t()``; what torch's compiler calls for a linear layer on a CPU.

    A part of a wider matrix, whose rows or columns have gaps between them, would take 1,000 times as long.
    """
    if not (weight.is_contiguous() or weight.t().is_contiguous()):
        weight = weight.contiguous()
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, None, "none", [], "")
