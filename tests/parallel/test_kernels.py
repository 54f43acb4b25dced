"""Attention kernels and the ring's steps agree with softmax attention written out in float64."""

from importlib import invalidate_caches
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import _fa3, list_flash_attention_impls

from backends.common.attention import kernels
from backends.common.attention.kernels import (
    AttentionKernel,
    CpuFlash,
    CudaFlash,
    Pairing,
    Saved,
    Segments,
    choose_flash_attention,
    kernel_for,
)
from slime_like.checks.packages import has_flash_attention_2
from tests.parallel.dense import assert_near, dense_results, ring_by_steps, segments_of

HEADS, GROUPS, WIDTH, SCALE = 4, 2, 16, 0.25


def _check(
    kernel: AttentionKernel, width: int, q_lens: list[int], k_lens: list[int] | None = None,
    causal: bool = True, groups: int = GROUPS, dtype: torch.dtype = torch.float32, bound: float = 2e-6,
    window: int | None = None,
) -> None:  # fmt: skip
    """Compare forward and backward on random tensors with values of ``width``."""
    generator, k_lens = torch.Generator().manual_seed(0), k_lens or q_lens
    q, grad = (torch.randn(sum(q_lens), HEADS, size, generator=generator).to(dtype) for size in (WIDTH, width))
    k, v = (torch.randn(sum(k_lens), groups, size, generator=generator).to(dtype) for size in (WIDTH, width))
    pairing = Pairing(segments_of(q_lens), segments_of(k_lens), causal, SCALE, window)
    out, lse = kernel.forward(q, k, v, pairing)
    found = [out, lse, *kernel.backward(grad, Saved(q, k, v, out, lse), pairing)]
    assert_near(found, dense_results(q, k, v, grad, q_lens, SCALE, k_lens, causal, window=window), bound)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.float64, 1e-12), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize(
    ("q_lens", "k_lens", "causal"),
    [([7, 1, 12], [7, 1, 12], True), ([40], [40], True), ([3, 5], [6, 10], False), ([4, 2], [2, 1], False)],
)
def test_cpu_kernel_is_softmax_attention(
    q_lens: list[int], k_lens: list[int], causal: bool, dtype: torch.dtype, bound: float
) -> None:
    _check(CpuFlash(), WIDTH, q_lens, k_lens, causal, dtype=dtype, bound=bound)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.float64, 1e-12), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize(
    ("q_lens", "k_lens", "window"),
    [([7, 1, 12], [7, 1, 12], 2), ([7, 1, 12], [7, 1, 12], 7), ([4, 9], [9, 9], 6), ([1100], [1100], 3)],
)
def test_windows_end_at_the_last_key(
    q_lens: list[int], k_lens: list[int], window: int, dtype: torch.dtype, bound: float
) -> None:
    """Also in segments of which the operator skips whole blocks of keys."""
    _check(CpuFlash(), WIDTH, q_lens, k_lens, dtype=dtype, bound=bound, window=window)


def test_values_may_be_narrower_than_queries_and_keys() -> None:
    """As in latent attention; the kernel gets values padded with zeros."""
    _check(kernel_for("cpu"), 10, [7, 1, 12], groups=HEADS)


def _fa3_pairing(cu_q: Tensor, cu_k: Tensor, scale: float, causal: bool, left: int, right: int) -> Pairing:
    assert right == (-1 if left < 0 else 0)
    return Pairing(Segments.of(cu_q), Segments.of(cu_k), causal, scale, None if left < 0 else left + 1)


def _fa3_forward(*given: Any) -> tuple[Any, ...]:
    """Have the arguments of FlashAttention 3's operator, as torch passes them."""
    return *CpuFlash().forward(*given[:3], _fa3_pairing(*given[7:9], *given[23:27])), None, None


def _fa3_backward(grad: Tensor, *given: Any) -> None:
    found = CpuFlash().backward(grad, Saved(*given[:5]), _fa3_pairing(*given[8:10], *given[14:18]))
    for gradient, out in zip(found, given[5:8], strict=True):
        out.copy_(gradient)


@pytest.mark.parametrize(
    ("q_lens", "k_lens", "causal", "window"),
    [([7, 1, 12], None, True, None), ([3, 5], [6, 10], False, None), ([4, 9], [9, 9], True, 6)],
)
def test_flash_attention_3_gets_its_arguments_through_torch(
    q_lens: list[int], k_lens: list[int] | None, causal: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's adapter is real, and what it calls on CUDA is our kernel for the CPU."""
    for name in ("_fa3_forward_support_error", "_fa3_backward_support_error"):
        monkeypatch.setattr(_fa3, name, lambda *tensors: None)
    monkeypatch.setattr(_fa3, "_FA3_CUDA_FWD", _fa3_forward)
    monkeypatch.setattr(_fa3, "_FA3_CUDA_BWD", _fa3_backward)
    adapters = _fa3._fa3_flash_attention_forward_impl_default, _fa3._fa3_flash_attention_backward_impl
    for direction, adapter in zip(("forward", "backward"), adapters, strict=True):
        monkeypatch.setattr(torch.ops.aten, f"_flash_attention_{direction}", adapter)
    _check(CudaFlash(), WIDTH, q_lens, k_lens, causal, window=window)


@pytest.mark.parametrize(
    ("setting", "major", "installed", "expected"),
    [
        ("auto", 9, True, ["FA3"]),
        ("auto", 9, False, []),
        ("auto", 10, True, []),
        ("torch", 9, True, []),
        ("fa3", 9, True, ["FA3"]),
        ("fa4", 10, True, ["FA4"]),
    ],
)
def test_flash_attention_3_is_used_on_hopper(
    setting: str, major: int, installed: bool, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[str] = []
    monkeypatch.setattr(kernels, "is_installed", lambda module: installed)
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", chosen.append)
    choose_flash_attention(setting, (major, 0))
    assert chosen == expected and set(chosen) <= set(list_flash_attention_impls())


def test_cuda_kernel_reads_grouped_heads_in_place() -> None:
    """On torch's meta device: the operators take these arguments, and keys and values are not repeated."""
    segments = segments_of([7, 1, 12])
    segments = Segments(segments.host, segments.device.to("meta"), segments.longest)
    q = torch.empty(20, HEADS, WIDTH, dtype=torch.bfloat16, device="meta")
    k, v = (torch.empty(20, GROUPS, WIDTH, dtype=torch.bfloat16, device="meta") for _ in range(2))
    kernel, called, pairing = CudaFlash(), _Called(), Pairing(segments, segments, True, SCALE, window=5)
    with called:
        out, lse = kernel.forward(q, k, v, pairing)
        grads = kernel.backward(out, Saved(q, k, v, out, lse), pairing)
    assert out.shape == q.shape and lse.shape == (HEADS, 20) and lse.dtype == torch.float32
    assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]
    attention = {"aten::_flash_attention_forward": (1, 2), "aten::_flash_attention_backward": (2, 3)}
    for name, places in attention.items():
        ((arguments, options),) = [found for operator, *found in called.operators if operator == name]
        assert (options["window_size_left"], options["window_size_right"]) == (4, 0)
        assert [arguments[place].shape for place in places] == [k.shape, v.shape]
    copies = [name for name, *_ in called.operators if any(word in name for word in ("repeat", "expand", "cat"))]
    assert copies == []


class _Called(torch.utils._python_dispatch.TorchDispatchMode):
    """Records every operator that torch runs, with its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[tuple[str, tuple[object, ...], dict[str, object]]] = []

    def __torch_dispatch__(self, function, types, arguments=(), options=None):  # type: ignore[no-untyped-def]
        self.operators.append((function._schema.name, arguments, options or {}))
        return function(*arguments, **(options or {}))


def test_empty_segments_are_left_out() -> None:
    assert Segments.of(torch.tensor([0, 0, 3, 3, 5, 5], dtype=torch.int32)).host == (0, 3, 5)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_steps_add_up_to_softmax_attention(size: int, dtype: torch.dtype, bound: float) -> None:
    lengths, generator = [16, 8, 40], torch.Generator().manual_seed(size)
    q, grad = (torch.randn(64, 4, 16, generator=generator).to(dtype) for _ in range(2))
    k, v = (torch.randn(64, 2, 16, generator=generator).to(dtype) for _ in range(2))
    found = ring_by_steps(CpuFlash(), q, k, v, grad, lengths, size, 0.25)
    out, _, *grads = dense_results(q, k, v, grad, lengths, 0.25)
    assert_near(found, [out, *grads], bound)


def test_another_version_of_flash_attn_is_not_taken_for_version_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 4 is a folder ``flash_attn/cute``, so ``flash_attn`` can be imported as a namespace."""
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    (tmp_path / "flash_attn" / "cute" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert not has_flash_attention_2()
    (tmp_path / "flash_attn_2_cuda.py").touch()
    invalidate_caches()
    assert has_flash_attention_2()
