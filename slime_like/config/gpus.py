"""Kinds of GPUs for a plan, with values of their data sheets and measured rates."""

from dataclasses import dataclass
from typing import Literal

GpuName = Literal["a100-80gb", "h100-80gb", "h200-141gb", "b200"]


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU: total memory as CUDA reports it, dense bfloat16 rate (1e12 per second), and bandwidths.

    Attributes:
        measured_tflops: the highest rate measured of large bfloat16 matrix products; ``None``: never measured.
    """

    memory_gib: float
    tflops: float
    memory_gb_per_s: float
    nvlink_gb_per_s: float  # to the other GPUs of its node, in one direction
    measured_tflops: float | None = None

    @property
    def ceiling_tflops(self) -> float:
        """The measured rate, or the share of the data sheet's that H100 reaches."""
        return self.measured_tflops or _REACHED * self.tflops


_REACHED = 0.8


# SXM modules: NVIDIA's data sheets of A100, H100, H200 and B200 (sparse rates halved, both directions of NVLink too).
GPUS: dict[GpuName, Gpu] = {
    "a100-80gb": Gpu(79.1, 312, 2039, 300),
    "h100-80gb": Gpu(79.1, 989, 3350, 450, 790),
    "h200-141gb": Gpu(139.8, 989, 4800, 450, 790),
    "b200": Gpu(178.3, 2250, 7700, 900),
}
