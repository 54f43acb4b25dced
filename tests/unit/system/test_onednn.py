"""Products by oneDNN against float64. Other products are unchanged."""

import pytest
import torch

from slime_like.system.onednn import product, replaced_products

_M, _K, _N = 300, 130, 90


def _random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


def _close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Compare to a few float32 roundings of the largest value."""
    return float((found.detach().double() - expected).abs().max()) < 2e-6 * float(expected.abs().max())


@pytest.mark.parametrize("a_by_rows", [True, False])
@pytest.mark.parametrize("b_by_rows", [True, False])
@pytest.mark.parametrize(("m", "n"), [(_M, _N), (_N, _M)])
def test_product_of_either_order(a_by_rows: bool, b_by_rows: bool, m: int, n: int) -> None:
    a = _random(m, _K) if a_by_rows else _random(_K, m).t()
    b = _random(_K, n) if b_by_rows else _random(n, _K).t()
    found = product(a, b)
    assert found.is_contiguous()
    assert _close(found, a.double() @ b.double())


@pytest.mark.parametrize("inner", [1024, 1025, 2500])
def test_a_long_sum_over_columns_of_both(inner: int) -> None:
    """This is the product of a weight's gradient."""
    a, b = _random(inner, 40).t(), _random(inner, 30)
    found = product(a, b)
    assert found.is_contiguous() and _close(found, a.double() @ b.double())


def test_layers_and_their_gradients() -> None:
    x, weight, bias = _random(2, _M, _K), _random(_N, _K), _random(_N)
    leaves = [each.clone().requires_grad_() for each in (x, weight, bias)]
    exact = [each.double().requires_grad_() for each in (x, weight, bias)]
    grad = _random(2, _M, _N)
    torch.nn.functional.linear(*exact).backward(grad.double())
    plain = torch.nn.functional.linear(*exact[:2])
    kept = replaced_products()
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
    kept = replaced_products()
    found = [a @ b, torch.addmm(bias, a, b, beta=0.5, alpha=2.0), torch.addmm(b, a, b)]
    del kept
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_wrong_shapes_raise_torchs_error() -> None:
    kept = replaced_products()
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        torch.mm(_random(500, 500), _random(400, 500))
    del kept


def test_parts_of_a_wider_matrix() -> None:
    """Either factor may have gaps between its rows or columns."""
    a, wide, high = _random(_M, _K), _random(_K, 2 * _N)[:, :_N], _random(_K, 2 * _M)[:, ::2].t()
    for left, right in ((a, wide), (high, wide), (high, _random(_K, _N))):
        assert _close(product(left, right), left.double() @ right.double())
