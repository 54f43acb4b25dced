"""Attention kernels against softmax written out in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from backends.megatron.kernels import CpuFlash, Segments

HEADS, GROUPS, WIDTH, SCALE = 4, 2, 16, 0.25


def _segments(lengths: list[int]) -> Segments:
    return Segments.of(torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32))


def _dense(
    q: Tensor, k: Tensor, v: Tensor, q_lens: list[int], k_lens: list[int], causal: bool
) -> tuple[Tensor, Tensor]:
    outs, sums = [], []
    for qs, ks, vs in zip(q.split(q_lens), k.split(k_lens), v.split(k_lens), strict=True):
        ks, vs = (x.repeat_interleave(HEADS // GROUPS, dim=1) for x in (ks, vs))
        scores = torch.einsum("qhd,khd->hqk", qs, ks) * SCALE
        if causal:
            scores = scores.masked_fill(torch.ones(scores.shape[1:]).triu(1).bool(), float("-inf"))
        outs.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), vs))
        sums.append(scores.logsumexp(-1))
    return torch.cat(outs), torch.cat(sums, dim=1)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.float64, 1e-12), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize(
    ("q_lens", "k_lens", "causal"),
    [([7, 1, 12], [7, 1, 12], True), ([40], [40], True), ([3, 5], [6, 10], False), ([4, 2], [2, 1], False)],
)
def test_cpu_kernel_is_softmax_attention(
    q_lens: list[int], k_lens: list[int], causal: bool, dtype: torch.dtype, bound: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(sum(q_lens), HEADS, WIDTH, generator=generator).to(dtype)
    k, v = (torch.randn(sum(k_lens), GROUPS, WIDTH, generator=generator).to(dtype) for _ in range(2))
    grad = torch.randn(q.shape, generator=generator).to(dtype)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = _dense(*leaves, q_lens, k_lens, causal)
    out.backward(grad.double())
    kernel, q_segments, k_segments = CpuFlash(), _segments(q_lens), _segments(k_lens)
    found, found_lse = kernel.forward(q, k, v, q_segments, k_segments, causal, SCALE)
    found_grads = kernel.backward(grad, q, k, v, found, found_lse, q_segments, k_segments, causal, SCALE)
    pairs = zip([found, found_lse, *found_grads], [out, lse, *(x.grad for x in leaves)], strict=True)
    for ours, expected in pairs:
        assert expected is not None
        error = (ours.double() - expected).norm() / expected.norm()
        assert error < bound


def test_empty_segments_are_left_out() -> None:
    assert Segments.of(torch.tensor([0, 0, 3, 3, 5, 5], dtype=torch.int32)).host == (0, 3, 5)
