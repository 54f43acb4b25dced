"""NVIDIA GPUs of this machine, looked at without torch, and without initialising CUDA."""

import ctypes
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

_GPU = re.compile(r"nvidia\d+")
_NVML = "libnvidia-ml.so.1"


def local_gpus(devices: Path = Path("/dev")) -> int:
    """NVIDIA GPUs that processes started here may use: those of ``CUDA_VISIBLE_DEVICES``, else all there are."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    there = sum(bool(_GPU.fullmatch(entry.name)) for entry in devices.iterdir())
    if visible is None or not there:
        return there
    return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])


def compute_capability(device: str, load: Callable[[str], Any] = ctypes.CDLL) -> tuple[int, int] | None:
    """Compute capability of a GPU, asked of the driver's management library.

    Args:
        device: its index or its UUID, as in ``CUDA_VISIBLE_DEVICES``.

    Returns:
        ``None`` where it cannot be found out.
    """
    try:
        nvml = load(_NVML)
    except OSError:
        return None
    handle, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
    if nvml.nvmlInit_v2():
        return None
    try:
        if device.isdecimal():
            failed = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(device)), ctypes.byref(handle))
        else:
            failed = nvml.nvmlDeviceGetHandleByUUID(device.encode(), ctypes.byref(handle))
        if failed or nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor)):
            return None
        return major.value, minor.value
    finally:
        nvml.nvmlShutdown()
