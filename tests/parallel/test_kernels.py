"""Attention kernels against softmax written out in float64."""

import sys

import pytest
import torch

from backends.common.attention.flash_attn_on_cpu import flash_attn_modules
from backends.common.attention.kernels import CpuFlash, CudaFlash, FlashAttention, Pairing, Saved, Segments, kernel_for
from tests.parallel.dense import dense_attention, relative_error, segments_of

HEADS, GROUPS, WIDTH, SCALE = 4, 2, 16, 0.25


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
    out, lse = dense_attention(*leaves, q_lens, k_lens, causal, SCALE)
    out.backward(grad.double())
    kernel, pairing = CpuFlash(), Pairing(segments_of(q_lens), segments_of(k_lens), causal, SCALE)
    found, found_lse = kernel.forward(q, k, v, pairing)
    found_grads = kernel.backward(grad, Saved(q, k, v, found, found_lse), pairing)
    pairs = zip([found, found_lse, *found_grads], [out, lse, *(x.grad for x in leaves)], strict=True)
    for ours, expected in pairs:
        assert expected is not None
        assert relative_error(ours, expected) < bound


def test_values_may_be_narrower_than_queries_and_keys() -> None:
    """As in latent attention; beside them a kernel sees zeros."""
    generator, lengths = torch.Generator().manual_seed(0), [7, 1, 12]
    q, k = (torch.randn(20, HEADS, WIDTH, generator=generator) for _ in range(2))
    v, grad = (torch.randn(20, HEADS, 10, generator=generator) for _ in range(2))
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = dense_attention(*leaves, lengths, lengths, True, SCALE)
    out.backward(grad.double())
    kernel, pairing = kernel_for("cpu"), Pairing(segments_of(lengths), segments_of(lengths), True, SCALE)
    found, found_lse = kernel.forward(q, k, v, pairing)
    grads = kernel.backward(grad, Saved(q, k, v, found, found_lse), pairing)
    for ours, expected in zip([found, found_lse, *grads], [out, lse, *(x.grad for x in leaves)], strict=True):
        assert expected is not None and ours.shape == expected.shape
        assert relative_error(ours, expected.detach()) < 2e-6


def test_cuda_kernel_reads_grouped_heads_in_place() -> None:
    """Shapes alone, on torch's meta device: the operators take these arguments, and keys and values unrepeated."""
    segments = segments_of([7, 1, 12])
    segments = Segments(segments.host, segments.device.to("meta"), segments.longest)
    q = torch.empty(20, HEADS, WIDTH, dtype=torch.bfloat16, device="meta")
    k, v = (torch.empty(20, GROUPS, WIDTH, dtype=torch.bfloat16, device="meta") for _ in range(2))
    kernel, called, pairing = CudaFlash(), _Called(), Pairing(segments, segments, True, SCALE)
    with called:
        out, lse = kernel.forward(q, k, v, pairing)
        grads = kernel.backward(out, Saved(q, k, v, out, lse), pairing)
    assert out.shape == q.shape and lse.shape == (HEADS, 20) and lse.dtype == torch.float32
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]
    attention = {"aten::_flash_attention_forward": (1, 2), "aten::_flash_attention_backward": (2, 3)}
    for name, places in attention.items():
        (arguments,) = [found for operator, found in called.operators if operator == name]
        assert [arguments[place].shape for place in places] == [k.shape, v.shape]
    copies = [name for name, _ in called.operators if any(word in name for word in ("repeat", "expand", "cat"))]
    assert copies == []


class _Called(torch.utils._python_dispatch.TorchDispatchMode):
    """Every operator that torch runs meanwhile, with its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[tuple[str, tuple[object, ...]]] = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):  # type: ignore[no-untyped-def]
        self.operators.append((function._schema.name, arguments))
        return function(*arguments, **(options or {}))


def test_flash_attn_is_called_as_its_interface_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package itself needs CUDA; in its place stand functions with its arguments, computed on the CPU."""
    for name, module in flash_attn_modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    generator, lengths = torch.Generator().manual_seed(0), [7, 1, 12]
    q, grad = (torch.randn(20, HEADS, WIDTH, generator=generator) for _ in range(2))
    k, v = (torch.randn(20, GROUPS, WIDTH, generator=generator) for _ in range(2))
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = dense_attention(*leaves, lengths, lengths, True, SCALE)
    out.backward(grad.double())
    kernel, pairing = FlashAttention(), Pairing(segments_of(lengths), segments_of(lengths), True, SCALE)
    found, found_lse = kernel.forward(q, k, v, pairing)
    grads = kernel.backward(grad, Saved(q, k, v, found, found_lse), pairing)
    for ours, expected in zip([found, found_lse, *grads], [out, lse, *(x.grad for x in leaves)], strict=True):
        assert expected is not None
        assert relative_error(ours, expected.detach()) < 2e-6


def test_empty_segments_are_left_out() -> None:
    assert Segments.of(torch.tensor([0, 0, 3, 3, 5, 5], dtype=torch.int32)).host == (0, 3, 5)
