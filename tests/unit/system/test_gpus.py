"""GPUs of this machine: how many there are; their compute capability and their cores by the driver's library."""

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slime_like.system import gpus
from slime_like.system.gpus import compute_capability, local_gpus, stay_near


def test_gpus_are_counted_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert local_gpus(tmp_path) == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,10")
    assert local_gpus(tmp_path) == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert local_gpus(tmp_path) == 0


def library(fails: str = "") -> Any:
    """As NVML, with one GPU of compute capability 9.0; calls return 0, or 999 for the one that ``fails``."""

    def call(name: str, act: Any) -> Any:
        def function(*arguments: Any) -> int:
            act(*arguments)
            return 999 if name == fails else 0

        return function

    def find(device: Any, handle: Any) -> None:
        assert device in (b"GPU-7f", 3) or device.value == 3
        handle._obj.value = 1234

    def capability(handle: Any, major: Any, minor: Any) -> None:
        assert handle.value == 1234
        major._obj.value, minor._obj.value = 9, 0

    def affinity(handle: Any, size: Any, words: Any) -> None:
        assert handle.value == 1234 and size.value == len(words)
        words[0], words[1] = 0b1010, 1 << 6  # cores 1, 3 and 70

    functions = {
        "nvmlDeviceGetCpuAffinity": affinity,
        "nvmlInit_v2": lambda: None,
        "nvmlDeviceGetHandleByIndex_v2": find,
        "nvmlDeviceGetHandleByUUID": find,
        "nvmlDeviceGetCudaComputeCapability": capability,
        "nvmlShutdown": lambda: None,
    }
    return SimpleNamespace(**{name: call(name, act) for name, act in functions.items()})


@pytest.mark.parametrize("device", ["3", "GPU-7f"])
def test_compute_capability(device: str) -> None:
    assert compute_capability(device, lambda _: library()) == (9, 0)
    for fails in ("nvmlInit_v2", "nvmlDeviceGetCudaComputeCapability"):
        assert compute_capability(device, lambda _, fails=fails: library(fails)) is None


def test_without_a_driver_it_is_unknown() -> None:
    assert compute_capability("0", lambda _: ctypes.CDLL("libnvidia-ml-missing.so.1")) is None


@pytest.mark.parametrize(
    ("allowed", "fails", "expected"),
    [
        (range(96), "", {1, 3, 70}),
        ({0, 1, 2, 70}, "", {1, 70}),  # what the user or a container leaves
        ({0, 2}, "", None),
        (range(96), "nvmlDeviceGetCpuAffinity", None),
        (range(96), "nvmlDeviceGetHandleByUUID", None),
    ],
)
def test_a_process_stays_on_its_gpus_cores(
    allowed: Any, fails: str, expected: set[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: list[set[int]] = []
    monkeypatch.setattr(gpus.os, "sched_getaffinity", lambda pid: set(allowed))
    monkeypatch.setattr(gpus.os, "sched_setaffinity", lambda pid, cores: bound.append(cores))
    stay_near("GPU-7f", lambda _: library(fails))
    assert bound == ([] if expected is None else [expected])
