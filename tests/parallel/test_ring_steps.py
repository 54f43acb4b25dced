"""The ring's steps against softmax written out in float64; with CUDA's kernels: ``tests/gpu/test_kernels.py``."""

import pytest
import torch

from backends.common.attention.kernels import CpuFlash
from tests.parallel.dense import assert_near, dense_results
from tests.parallel.ring_steps import ring_by_steps


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_steps_add_up_to_softmax_attention(size: int, dtype: torch.dtype, bound: float) -> None:
    lengths, generator = [16, 8, 40], torch.Generator().manual_seed(size)
    q, grad = (torch.randn(64, 4, 16, generator=generator).to(dtype) for _ in range(2))
    k, v = (torch.randn(64, 2, 16, generator=generator).to(dtype) for _ in range(2))
    found = ring_by_steps(CpuFlash(), q, k, v, grad, lengths, size, 0.25)
    out, _, *grads = dense_results(q, k, v, grad, lengths, 0.25)
    assert_near(found, [out, *grads], bound)
