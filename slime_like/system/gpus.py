"""NVIDIA GPUs of this machine, looked at without torch, and without initialising CUDA."""

import ctypes
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

_GPU = re.compile(r"nvidia\d+")
_NVML = "libnvidia-ml.so.1"
_MASK_WORDS = 64
"""Words of the library's masks of cores: enough for 4,096."""

_Answer = TypeVar("_Answer")


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

    def ask(nvml: Any, handle: ctypes.c_void_p) -> tuple[int, int] | None:
        major, minor = ctypes.c_int(), ctypes.c_int()
        failed = nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
        return None if failed else (major.value, minor.value)

    return _asked(device, load, ask)


def stay_near(device: str, load: Callable[[str], Any] = ctypes.CDLL) -> None:
    """Keep this thread, and threads it starts, on the cores of the GPU's NUMA node.

    Host memory that they touch first is then on that node, too; a copy from another one takes two to three times as
    long. Cores that this process may not use stay out. If no core is left or none is known, nothing changes.

    Args:
        device: its index or its UUID.
    """

    def ask(nvml: Any, handle: ctypes.c_void_p) -> set[int]:
        words = (ctypes.c_ulong * _MASK_WORDS)()
        if nvml.nvmlDeviceGetCpuAffinity(handle, ctypes.c_uint(_MASK_WORDS), words):
            return set()
        mask = int.from_bytes(bytes(words), "little")
        return {core for core in range(mask.bit_length()) if mask >> core & 1}

    if near := (_asked(device, load, ask) or set()) & os.sched_getaffinity(0):
        os.sched_setaffinity(0, near)


def _asked(device: str, load: Callable[[str], Any], ask: Callable[[Any, ctypes.c_void_p], _Answer]) -> _Answer | None:
    """Return what ``ask`` finds out about a device from the library and the device's handle."""
    try:
        nvml = load(_NVML)
    except OSError:
        return None
    if nvml.nvmlInit_v2():
        return None
    handle = ctypes.c_void_p()
    try:
        if device.isdecimal():
            failed = nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(device)), ctypes.byref(handle))
        else:
            failed = nvml.nvmlDeviceGetHandleByUUID(device.encode(), ctypes.byref(handle))
        return None if failed else ask(nvml, handle)
    finally:
        nvml.nvmlShutdown()
