"""Our RMSNorm against its formula, and its gradient."""

from types import SimpleNamespace

import pytest
import torch

from backends.megatron.norm import RMSNorm


def _norm(dtype: torch.dtype) -> RMSNorm:
    config = SimpleNamespace(params_dtype=dtype, sequence_parallel=False, use_cpu_initialization=True)
    norm = RMSNorm(config, hidden_size=24, eps=1e-5)
    with torch.no_grad():
        norm.weight.add_(0.3 * torch.randn(24, generator=torch.Generator().manual_seed(1)))
    return norm


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_output_and_gradients(dtype: torch.dtype, bound: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, 24, generator=generator).to(dtype).requires_grad_()
    grad = torch.randn(5, 3, 24, generator=generator).to(dtype)
    norm = _norm(dtype)
    out = norm(x)
    out.backward(grad)
    wide, weight = x.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    expected.backward(grad.double())
    assert out.dtype == dtype
    for ours, theirs in ((out, expected), (x.grad, wide.grad), (norm.weight.grad, weight.grad)):
        assert ours is not None and theirs is not None
        assert float((ours.double() - theirs).norm() / theirs.norm()) < bound
