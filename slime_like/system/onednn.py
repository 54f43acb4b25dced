"""Matrix products in float32 by oneDNN, on processors where it is faster than torch's default.

torch uses MKL, which uses AVX-512 only on Intel's processors. On one core of an AMD EPYC 9005, MKL's code for AVX2
reaches 80 GFLOP/s, and oneDNN, which torch also ships, reaches 200. Both round in float32. torch has no switch.
"""

import warnings
from functools import cache, reduce
from typing import Any

import torch
from torch import Tensor

_LEAST_PRODUCTS = 2**20
"""Multiplications below which the cost of a call dominates."""
_INNER_BLOCK = 1024
"""Length of the blocks that are copied into rows, so they stay in the cache."""


@cache
def use_onednn() -> tuple[object, ...]:
    """Let torch compute large float32 matrix products on the CPU by oneDNN from now on, if that is faster here.

    This applies to the whole process, including autograd, for the lifetime of the returned objects.
    """
    capabilities = torch.cpu.get_capabilities()
    wide = capabilities.get("avx512_f") and not str(capabilities.get("cpu_name", "Intel")).startswith("Intel")
    pays = wide and torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    return replace_products() if pays else ()


def replace_products() -> tuple[object, ...]:
    """Do the same on any processor. It ends with the lifetime of the returned objects."""
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
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        library.impl("mm", mm, "CPU", with_keyset=True)
        library.impl("addmm", addmm, "CPU", with_keyset=True)
    return (library,)


def _is_large(a: Tensor, b: Tensor) -> bool:
    fits = a.dtype == b.dtype == torch.float32 and a.shape[0] * b.numel() >= _LEAST_PRODUCTS
    return fits and a.ndim == b.ndim == 2 and a.shape[1] == b.shape[0]


def product(a: Tensor, b: Tensor) -> Tensor:
    """Multiply (M, K) by (K, N). The result is contiguous.

    oneDNN needs one factor in rows. If neither is, as in a weight's gradient, the smaller one is copied, in blocks if K
    is long.
    """
    if a.is_contiguous():
        return _linear(a, b.t())
    if b.t().is_contiguous():
        return _linear(b.t(), a).t().contiguous()
    if a.numel() > b.numel():
        return _blocks(b.t(), a.t()).t().contiguous()
    return _blocks(a, b)


def _blocks(a: Tensor, b: Tensor) -> Tensor:
    """Multiply with ``a`` copied into rows, block by block along K."""
    pairs = zip(a.split(_INNER_BLOCK, dim=1), b.split(_INNER_BLOCK), strict=True)
    return reduce(Tensor.add_, (_linear(left.contiguous(), right.t()) for left, right in pairs))


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    """Compute ``x @ weight.t()`` by the operator that torch's compiler uses for a linear layer on a CPU.

    A weight with gaps between its rows or columns would take 1,000 times as long, so it is copied.
    """
    if not (weight.is_contiguous() or weight.t().is_contiguous()):
        weight = weight.contiguous()
    return torch.ops.mkldnn._linear_pointwise.default(x, weight, None, "none", [], "")
