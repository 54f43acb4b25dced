"""Experts' grouped products and compiled SwiGLU agree on CUDA with products written out; the host never waits."""

import pytest
import torch
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from torch import Tensor

from backends.common.step.grouped_product import grouped_linear
from tests.parallel.dense import relative_error

pytestmark = pytest.mark.gpu

BOUND = 2e-2  # bfloat16, by norm
K, N = 256, 384


def _noise(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").bfloat16().requires_grad_()


@pytest.mark.parametrize("rows", [[130, 1, 7, 64], [0, 500, 0, 33], [5, 0, 0, 0], [0, 0, 0, 0]])
def test_grouped_product(rows: list[int]) -> None:
    """Runs twice: for an expert without rows a kernel could leave an earlier tensor's values in memory."""
    x, weights = _noise(sum(rows), K, seed=0), [_noise(N, K, seed=1 + expert) for expert in range(len(rows))]
    grad, ends = _noise(sum(rows), N, seed=9), torch.tensor(rows, device="cuda").cumsum(0, dtype=torch.int32)
    exact = [leaf.detach().double().requires_grad_() for leaf in (x, *weights)]
    out = torch.cat([part @ weight.T for part, weight in zip(exact[0].split(rows), exact[1:], strict=True)])
    expected = [out.detach(), *torch.autograd.grad(out, exact, grad.double())]
    for _ in range(2):
        torch.full((4, N, K), torch.nan, device="cuda", dtype=torch.bfloat16)  # freed, then reused
        torch.cuda.set_sync_debug_mode("error")
        try:
            mine = grouped_linear(x, ends, weights)
            found = [mine.detach(), *torch.autograd.grad(mine, [x, *weights], grad)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for ours, wanted in zip(found, expected, strict=True):
            assert relative_error(ours, wanted) < BOUND if wanted.any() else not ours.any()


@pytest.mark.parametrize("tokens", [1, 33, 4096])
def test_compiled_swiglu(tokens: int) -> None:
    gate_up, grad = _noise(tokens, 2 * N, seed=0), _noise(tokens, N, seed=1)
    shares = torch.rand(tokens, 1, device="cuda").requires_grad_()
    gate, up = gate_up.double().chunk(2, dim=-1)
    out = torch.nn.functional.silu(gate) * up * shares.double()
    expected = [out.detach(), *torch.autograd.grad(out, [gate_up, shares], grad.double())]
    mine = weighted_bias_swiglu_impl(gate_up, None, shares)
    for ours, wanted in zip([mine, *torch.autograd.grad(mine, [gate_up, shares], grad)], expected, strict=True):
        assert relative_error(ours.detach(), wanted.detach()) < BOUND
