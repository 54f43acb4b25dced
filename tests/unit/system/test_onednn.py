"""Products by oneDNN against float64. Other products are unchanged."""

import itertools

import pytest
import torch

from slime_like.system.onednn import product, replace_products

_M, _K, _N = 300, 130, 90


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


def _close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Compare to a few float32 roundings of the largest value."""
    return float((found.detach().double() - expected).abs().max()) < 2e-6 * float(expected.abs().max())


def _orders(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the matrix in memory row by row, and column by column."""
    return matrix.contiguous(), matrix.t().contiguous().t()


A, B = _random(_M, _K), _random(_K, _N)
WIDE, HIGH = _random(_K, 2 * _N)[:, :_N], _random(_K, 2 * _M)[:, ::2].t()
FACTORS = [
    *(*itertools.product(_orders(A), _orders(B)), *itertools.product(_orders(B.t()), _orders(A.t()))),
    *((_random(rows, 40).t(), _random(rows, 30)) for rows in (1024, 1025, 2500)),  # like the gradient of a weight
    *((A, WIDE), (HIGH, WIDE), (HIGH, B)),  # with gaps between rows or columns
]


@pytest.mark.parametrize(("a", "b"), FACTORS)
def test_product(a: torch.Tensor, b: torch.Tensor) -> None:
    found = product(a, b)
    assert found.is_contiguous() and _close(found, a.double() @ b.double())


def test_layers_and_their_gradients() -> None:
    x, weight, bias = _random(2, _M, _K), _random(_N, _K), _random(_N)
    leaves = [each.clone().requires_grad_() for each in (x, weight, bias)]
    exact = [each.double().requires_grad_() for each in (x, weight, bias)]
    grad = _random(2, _M, _N)
    torch.nn.functional.linear(*exact).backward(grad.double())
    plain = torch.nn.functional.linear(*exact[:2])
    kept = replace_products()
    out = torch.nn.functional.linear(*leaves)
    out.backward(grad)
    with torch.inference_mode():
        without_bias = torch.nn.functional.linear(x, weight)
    del kept
    assert _close(out, torch.nn.functional.linear(*exact))
    assert _close(without_bias, plain)
    for leaf, expected in zip(leaves, exact, strict=True):
        assert leaf.grad is not None and expected.grad is not None
        assert _close(leaf.grad, expected.grad)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float32])
def test_other_products_are_unchanged(dtype: torch.dtype) -> None:
    """Products of other types, and small ones."""
    size = 8 if dtype == torch.float32 else 200
    a, b, bias = _random(size, size, dtype=dtype), _random(size, size, dtype=dtype), _random(size, dtype=dtype)
    expected = [a @ b, torch.addmm(bias, a, b, beta=0.5, alpha=2.0), torch.addmm(b, a, b)]
    kept = replace_products()
    found = [a @ b, torch.addmm(bias, a, b, beta=0.5, alpha=2.0), torch.addmm(b, a, b)]
    del kept
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_wrong_shapes_raise_torchs_error() -> None:
    kept = replace_products()
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        torch.mm(_random(500, 500), _random(400, 500))
    del kept
