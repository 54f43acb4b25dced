"""CUDA's attention kernels, alone and in a ring's steps, agree with softmax written out in float32 on the device."""

import pytest
import torch
from torch import Tensor

from backends.common.attention.kernels import AttentionKernel, CudaFlash, Pairing, Saved
from tests.parallel.dense import dense_attention, relative_error, ring_by_steps, segments_of

pytestmark = pytest.mark.gpu

BOUND = 2e-2  # bfloat16, by norm
LSE_BOUND = 1e-3


@pytest.fixture
def kernel() -> AttentionKernel:
    return CudaFlash()


def _noise(tokens: int, heads: int, width: int, seed: int) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randn(tokens, heads, width, generator=generator, device="cuda").bfloat16()


@pytest.mark.parametrize(("heads", "groups", "width"), [(32, 8, 128), (16, 16, 64), (14, 2, 64)])
@pytest.mark.parametrize(
    ("q_lens", "k_lens", "causal", "window"),
    [
        ([1, 37, 1000, 7], [1, 37, 1000, 7], True, None),
        ([2048], [2048], True, None),
        ([3, 500], [6, 1000], False, None),
        ([400, 2], [200, 1], False, None),
        ([1, 37, 1000, 7], [1, 37, 1000, 7], True, 128),
        ([300, 700], [400, 700], True, 65),
    ],
)
def test_kernel_is_softmax_attention(
    kernel: AttentionKernel,
    q_lens: list[int],
    k_lens: list[int],
    causal: bool,
    window: int | None,
    heads: int,
    groups: int,
    width: int,
) -> None:
    scale = width**-0.5
    q, grad = (_noise(sum(q_lens), heads, width, seed) for seed in (0, 1))
    k, v = (_noise(sum(k_lens), groups, width, seed) for seed in (2, 3))
    leaves = [x.float().requires_grad_() for x in (q, k, v)]
    out, lse = dense_attention(*leaves, q_lens, k_lens, causal, scale, window=window)
    out.backward(grad.float())
    pairing = Pairing(segments_of(q_lens, "cuda"), segments_of(k_lens, "cuda"), causal, scale, window)
    found, found_lse = kernel.forward(q, k, v, pairing)
    grads = kernel.backward(grad, Saved(q, k, v, found, found_lse), pairing)
    assert found_lse.dtype == torch.float32
    torch.testing.assert_close(found_lse, lse.detach(), rtol=LSE_BOUND, atol=LSE_BOUND)
    for ours, expected in zip([found, *grads], [out, *(x.grad for x in leaves)], strict=True):
        assert expected is not None
        assert relative_error(ours, expected.detach()) < BOUND


@pytest.mark.parametrize("size", [2, 4])
def test_ring_steps_add_up_to_softmax_attention(kernel: AttentionKernel, size: int) -> None:
    lengths, heads, groups, width = [160, 8, 1024, 56], 32, 8, 128
    q, grad = (_noise(sum(lengths), heads, width, seed) for seed in (0, 1))
    k, v = (_noise(sum(lengths), groups, width, seed) for seed in (2, 3))
    leaves = [x.float().requires_grad_() for x in (q, k, v)]
    out, _ = dense_attention(*leaves, lengths, lengths, True, width**-0.5)
    out.backward(grad.float())
    found = ring_by_steps(kernel, q, k, v, grad, lengths, size, width**-0.5)
    for ours, expected in zip(found, [out, *(x.grad for x in leaves)], strict=True):
        assert expected is not None
        assert relative_error(ours, expected.detach()) < BOUND


def test_grouped_heads_are_not_repeated_in_memory(kernel: AttentionKernel) -> None:
    """Forward allocates its output and less than half of the size of repeated keys and values."""
    tokens, heads, groups, width = 16384, 32, 4, 128
    q, k, v = (_noise(tokens, count, width, 0) for count in (heads, groups, groups))
    pairing = Pairing(segments_of([tokens], "cuda"), segments_of([tokens], "cuda"), True, width**-0.5)
    kernel.forward(q, k, v, pairing)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kernel.forward(q, k, v, pairing)
    single, repeated = q.nbytes, 2 * q.nbytes
    assert torch.cuda.max_memory_allocated() - before < single + repeated / 2
