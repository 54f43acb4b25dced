"""Kinds of GPUs for a plan, with values of their data sheets."""

from dataclasses import dataclass
from typing import Literal

GpuName = Literal["a100-80gb", "h100-80gb", "h200-141gb", "b200"]


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU: total memory as CUDA reports it, dense bfloat16 rate (1e12 per second), and bandwidths."""

    memory_gib: float
    tflops: float
    memory_gb_per_s: float
    nvlink_gb_per_s: float  # to the other GPUs of its node, in one direction


# SXM modules: NVIDIA's data sheets of A100, H100, H200 and B200 (sparse rates halved, both directions of NVLink too).
GPUS: dict[GpuName, Gpu] = {
    "a100-80gb": Gpu(79.1, 312, 2039, 300),
    "h100-80gb": Gpu(79.1, 989, 3350, 450),
    "h200-141gb": Gpu(139.8, 989, 4800, 450),
    "b200": Gpu(178.3, 2250, 7700, 900),
}
