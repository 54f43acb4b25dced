"""Our RMSNorm agrees with its formula, and so does its gradient."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from backends.megatron.norm import RMSNorm


def _norm(dtype: torch.dtype, is_centered: bool = False) -> RMSNorm:
    config = SimpleNamespace(params_dtype=dtype, sequence_parallel=False, use_cpu_initialization=True)
    config.layernorm_zero_centered_gamma = is_centered
    norm = RMSNorm(config, hidden_size=24, eps=1e-5)
    with torch.no_grad():
        norm.weight.add_(0.3 * torch.randn(24, generator=torch.Generator().manual_seed(1)))
    return norm


@pytest.mark.parametrize("is_centered", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_output_and_gradients(dtype: torch.dtype, bound: float, is_centered: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, 24, generator=generator).to(dtype).requires_grad_()
    grad = torch.randn(5, 3, 24, generator=generator).to(dtype)
    norm = _norm(dtype, is_centered)
    out = norm(x)
    out.backward(grad)
    wide, weight = x.detach().double().requires_grad_(), norm.weight.detach().double().requires_grad_()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * (weight + is_centered)
    expected.backward(grad.double())
    assert out.dtype == dtype
    for ours, theirs in ((out, expected), (x.grad, wide.grad), (norm.weight.grad, weight.grad)):
        assert ours is not None and theirs is not None
        assert float((ours.double() - theirs).norm() / theirs.norm()) < bound


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 4e-3)])
def test_the_fused_operators_compute_the_same(
    dtype: torch.dtype, bound: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By torch's own definition on a CPU: forward bit for bit, gradients up to rounding."""
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(64, 1, 24, generator=generator).mul(3).to(dtype) for _ in range(2))
    found = []
    with torch.library._scoped_library("aten", "IMPL") as library:
        definition = torch._decomp.decomposition_table[torch.ops.aten._fused_rms_norm_backward.default]
        library.impl("_fused_rms_norm_backward", definition, "CPU")
        for fused in (False, True):
            monkeypatch.setattr("backends.megatron.norm._has_fused", lambda tensor, fused=fused: fused)
            norm, leaf = _norm(dtype), x.clone().requires_grad_()
            out = norm(leaf)
            out.backward(grad)
            found.append((out.detach(), leaf.grad, norm.weight.grad))
    (ours, *gradients), (theirs, *others) = found
    assert ours.dtype == theirs.dtype == dtype and torch.equal(ours, theirs)
    for mine, other in zip(gradients, others, strict=True):
        assert mine is not None and other is not None and mine.dtype == other.dtype == dtype
        assert float((mine.double() - other.double()).norm() / mine.double().norm()) < bound


def test_a_gpu_uses_the_fused_operators() -> None:
    """On the meta device, which has no fused forward operator and so shows its parts."""
    norm, x = _norm(torch.bfloat16).to("meta"), torch.ones(4, 1, 24, dtype=torch.bfloat16, device="meta")
    with _Named() as taken:
        norm(x.requires_grad_()).sum().backward()
    assert [name for name in taken.names if "rms" in name] == ["_fused_rms_norm_backward"]
    assert "rsqrt" in taken.names and "linalg_vecdot" not in taken.names
    assert x.grad is not None and x.grad.dtype == torch.bfloat16


class _Named(TorchDispatchMode):
    """Records the names of operators in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))
