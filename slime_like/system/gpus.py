"""NVIDIA GPUs of this machine, examined without torch and without initializing CUDA."""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_GPU = re.compile(r"nvidia\d+")
_MASK_WORDS = 64
"""64-bit words of a mask of cores: enough for 4,096."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One kind of GPU.

    Attributes:
        memory_gib: total memory as CUDA reports it.
        tflops: dense bfloat16 rate, in 1e12 per second.
        nvlink_gb_per_s: bandwidth to the other GPUs of the node, in one direction.
        measured_tflops: highest rate measured for large bfloat16 matrix products; ``None``: never measured.
        has_fp8: matrix products in FP8 have twice the bfloat16 rate.
    """

    memory_gib: float
    tflops: float
    memory_gb_per_s: float
    nvlink_gb_per_s: float
    measured_tflops: float | None = None
    has_fp8: bool = True

    @property
    def ceiling_tflops(self) -> float:
        """The measured rate, or the fraction of the data sheet's rate that an H100 reaches."""
        return self.measured_tflops or 0.8 * self.tflops


# SXM modules, from NVIDIA's data sheets. Sparse rates and NVLink's two directions are halved.
GPUS: dict[str, Gpu] = {
    "a100-80gb": Gpu(79.1, 312, 2039, 300, has_fp8=False),
    "h100-80gb": Gpu(79.1, 989, 3350, 450, 790),
    "h200-141gb": Gpu(139.8, 989, 4800, 450, 790),
    "b200": Gpu(178.3, 2250, 7700, 900),
}
"""Kinds of GPUs by the names of ``cluster.gpu``."""


def local_gpus(devices: Path = Path("/dev")) -> int:
    """Count the NVIDIA GPUs that processes started here may use, as limited by ``CUDA_VISIBLE_DEVICES``."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    there = sum(bool(_GPU.fullmatch(entry.name)) for entry in devices.iterdir())
    if visible is None or not there:
        return there
    return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])


def compute_capability(device: str) -> tuple[int, int] | None:
    """Return the compute capability of a GPU, given by index or UUID, or ``None`` if the driver doesn't know it."""
    found: tuple[int, int] | None = _asked(device, lambda nvml, gpu: nvml.nvmlDeviceGetCudaComputeCapability(gpu))
    return found


def stay_near(device: str) -> None:
    """Keep this thread, and threads it starts, on the cores of the GPU's NUMA node.

    Host memory that they touch first is then on that node, too. A copy from another node takes two to three times as
    long. Cores that this process may not use stay out. If no core is left or none is known, nothing changes.
    """
    words = _asked(device, lambda nvml, gpu: nvml.nvmlDeviceGetCpuAffinity(gpu, _MASK_WORDS)) or ()
    near = {64 * index + bit for index, word in enumerate(words) for bit in range(64) if word >> bit & 1}
    if near := near & os.sched_getaffinity(0):
        os.sched_setaffinity(0, near)


def _asked(device: str, ask: Callable[[Any, Any], Any]) -> Any:
    """Return what ``ask`` finds, given the library and the device's handle, or ``None`` if the library fails."""
    from ray._private.thirdparty import pynvml as nvml  # takes a second in a process without Ray

    try:
        nvml.nvmlInit()
        try:
            by_index = device.isdecimal()
            gpu = nvml.nvmlDeviceGetHandleByIndex(int(device)) if by_index else nvml.nvmlDeviceGetHandleByUUID(device)
            return ask(nvml, gpu)
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError:
        return None
