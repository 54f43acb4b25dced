"""Compute the arithmetic of a step, and measure the speed of matrix products."""

import time
from collections.abc import Sequence

import torch

from slime_like.algorithms import training_flops
from slime_like.models.dimensions import ModelDimensions
from slime_like.trajectory import PackedTrajectory

_SIZES = {"cuda": (4096, 8192, 16384), "cpu": (512, 1024, 2048)}
_REPEATS = 10


def step_flops(dimensions: ModelDimensions, packs: Sequence[PackedTrajectory]) -> float:
    """Return the necessary FLOPs of forward and backward, without recomputation, padding and the prompts' head."""
    width = dimensions.num_heads * (dimensions.head_dim + dimensions.value_dim) // 2
    head = 6.0 * dimensions.vocab_size * dimensions.hidden_size
    flops = 0.0
    for pack in packs:
        lengths = pack.cu_seqlens.diff()
        flops += sum(training_flops(lengths, width, dimensions.active_parameters, dimensions.attention_layers))
        flops -= head * int(pack.prompt_lens.sum())
    return flops


def matmul_ceiling(device: torch.device, dtype: torch.dtype) -> float:
    """Return the FLOP/s of the fastest of some large square matrix products."""
    return max(_product_speed(size, device, dtype) for size in _SIZES[device.type])


def _product_speed(size: int, device: torch.device, dtype: torch.dtype) -> float:
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    torch.mm(a, b, out=out)
    best = float("inf")
    for _ in range(3):
        _finish(device)
        started = time.perf_counter()
        for _ in range(_REPEATS):
            torch.mm(a, b, out=out)
        _finish(device)
        best = min(best, (time.perf_counter() - started) / _REPEATS)
    return 2.0 * size**3 / best


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
