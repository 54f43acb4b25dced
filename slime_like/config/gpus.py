"""Kinds of GPUs for a plan, with values from data sheets and measured rates."""

from dataclasses import dataclass
from typing import Literal

GpuName = Literal["a100-80gb", "h100-80gb", "h200-141gb", "b200"]


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU.

    Attributes:
        memory_gib: total memory as CUDA reports it.
        tflops: dense bfloat16 rate, in 1e12 per second.
        nvlink_gb_per_s: bandwidth to the other GPUs of the node, in one direction.
        measured_tflops: highest rate measured for large bfloat16 matrix products; ``None``: never measured.
    """

    memory_gib: float
    tflops: float
    memory_gb_per_s: float
    nvlink_gb_per_s: float
    measured_tflops: float | None = None

    @property
    def ceiling_tflops(self) -> float:
        """The measured rate, or the fraction of the data sheet's rate that an H100 reaches."""
        return self.measured_tflops or 0.8 * self.tflops


# SXM modules, from NVIDIA's data sheets. Sparse rates and NVLink's two directions are halved.
GPUS: dict[GpuName, Gpu] = {
    "a100-80gb": Gpu(79.1, 312, 2039, 300),
    "h100-80gb": Gpu(79.1, 989, 3350, 450, 790),
    "h200-141gb": Gpu(139.8, 989, 4800, 450, 790),
    "b200": Gpu(178.3, 2250, 7700, 900),
}
