"""Compute the arithmetic of a step, and measure the speed of matrix products."""

import time
from collections.abc import Sequence

import torch

from slime_like.models.dimensions import ModelDimensions
from slime_like.trajectory import PackedTrajectory

_SIZES = {"cuda": (4096, 8192, 16384), "cpu": (512, 1024, 2048)}
_REPEATS = 10


def step_flops(dimensions: ModelDimensions, packs: Sequence[PackedTrajectory]) -> float:
    """Return the necessary FLOPs of forward and backward, without recomputation and padding.

    Counts 6 FLOPs (2 forward, 4 backward) per matrix parameter of the layers and token, and per head parameter and
    response token. Causal attention needs half of L x L per sequence: in every layer 2 products of
    2 * L^2 / 2 * heads * head_dim forward, and 4 backward.
    """
    layers = dimensions.attention.matrices(dimensions) + dimensions.mlp_parameters(dimensions.moe_top_k)
    head = dimensions.vocab_size * dimensions.hidden_size
    width = dimensions.num_heads * (dimensions.head_dim + dimensions.value_dim) / 2
    flops = 0.0
    for pack in packs:
        lengths = pack.cu_seqlens.diff().double()
        attention = 6.0 * dimensions.num_layers * width * float((lengths * lengths).sum())
        flops += 6.0 * (layers * pack.actual_total_tokens + head * int(pack.response_lens.sum())) + attention
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
