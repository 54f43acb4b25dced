"""The grouped product of experts against dense float64 products, expert by expert."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from backends.common.step import grouped_product
from backends.common.step.grouped_product import grouped_linear
from backends.common.step.trace import Trace

K, N = 16, 24
ROWS = [[3, 1, 7], [0, 4, 5], [2, 0, 6], [5, 3, 0], [0, 0, 0]]
"""Of three experts: all are busy, the first, second or last one is idle, or all are."""
BOUND = {torch.float32: 1e-5, torch.bfloat16: 4e-2}


def _inputs(rows: list[int], dtype: torch.dtype) -> tuple[Tensor, Tensor, list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(sum(rows))
    x = torch.randn(sum(rows), K, generator=generator).to(dtype).requires_grad_()
    weights = [torch.randn(N, K, generator=generator).to(dtype).requires_grad_() for _ in rows]
    return x, torch.tensor(rows).cumsum(0, dtype=torch.int32), weights, torch.randn(sum(rows), N, generator=generator)


def _dense(x: Tensor, ends: Tensor, weights: list[Tensor], grad: Tensor) -> list[Tensor]:
    """Return output, gradient of x and gradients of the weights."""
    x, weights = x.detach().double().requires_grad_(), [w.detach().double().requires_grad_() for w in weights]
    parts = [x[first:end] @ w.T for (first, end), w in zip(pairwise([0, *ends.tolist()]), weights, strict=True)]
    out = torch.cat(parts)
    return [out, *torch.autograd.grad(out, [x, *weights], grad.double())]


def _poisoned(grouped_mm: Any) -> Any:
    """Make a kernel that leaves NaN for experts without rows."""

    def call(a: Tensor, b: Tensor, *, offs: Tensor) -> Tensor:
        out: Tensor = grouped_mm(a, b, offs=offs)
        if out.dim() == 3:
            out[offs.diff(prepend=offs.new_zeros(1)) == 0] = torch.nan
        return out

    return call


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("dtype", BOUND)
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_every_experts_product(
    rows: list[int], dtype: torch.dtype, stacked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouped_product.F, "grouped_mm", _poisoned(torch.nn.functional.grouped_mm))
    x, ends, weights, grad = _inputs(rows, dtype)
    out = grouped_linear(x, ends, torch.stack(weights) if stacked else weights)
    found = [out, *torch.autograd.grad(out, [x, *weights], grad.to(dtype))]
    for mine, exact in zip(found, _dense(x, ends, weights, grad.to(dtype)), strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.double(), exact, rtol=BOUND[dtype], atol=BOUND[dtype])


def test_weights_are_kept_for_the_backward_pass_without_a_copy() -> None:
    x, ends, weights, _ = _inputs([3, 1, 7], torch.float32)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        grouped_linear(x, ends, weights)
    own = {tensor.untyped_storage().data_ptr() for tensor in (x, ends, *weights)}
    assert {tensor.untyped_storage().data_ptr() for tensor in kept} == own


@pytest.mark.parametrize("dtype", BOUND)
def test_shapes_are_traced_with_equal_operations_in_every_type(dtype: torch.dtype) -> None:
    trace = Trace()
    with torch.device("meta"):
        x, weights = torch.empty(11, K, dtype=dtype), [torch.empty(N, K, dtype=dtype) for _ in range(3)]
        ends = torch.empty(3, dtype=torch.int32)
    with trace:
        out = grouped_linear(x.requires_grad_(), ends, [weight.requires_grad_() for weight in weights])
        grads = torch.autograd.grad(out, [x, *weights], torch.empty_like(out))
    assert [grad.shape for grad in grads] == [x.shape, *(weight.shape for weight in weights)]
    assert {out.dtype, *(grad.dtype for grad in grads)} == {dtype}
    assert trace.counted.matmul_flops == 3 * 2 * 11 * K * N
