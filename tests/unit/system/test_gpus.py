"""GPUs of this machine: their number, and what the driver's management library knows of them."""

from pathlib import Path
from typing import Any

import pytest
from ray._private.thirdparty import pynvml

from slime_like.system import gpus
from slime_like.system.gpus import compute_capability, local_gpus, stay_near

HANDLE = object()


def test_gpus_are_counted_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert local_gpus(tmp_path) == 3
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,10")
    assert local_gpus(tmp_path) == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert local_gpus(tmp_path) == 0


def use_library(monkeypatch: pytest.MonkeyPatch, fails: str = "") -> None:
    """Replace NVML by a machine with GPU 3, which is GPU-7f, of compute capability 9.0, near cores 1, 3 and 70."""
    answers: dict[str, tuple[list[Any], Any]] = {
        "Init": ([()], None),
        "Shutdown": ([()], None),
        "DeviceGetHandleByIndex": ([(3,)], HANDLE),
        "DeviceGetHandleByUUID": ([("GPU-7f",)], HANDLE),
        "DeviceGetCudaComputeCapability": ([(HANDLE,)], (9, 0)),
        "DeviceGetCpuAffinity": ([(HANDLE, 64)], [0b1010, 1 << 6] + [0] * 62),
    }

    def call(name: str, *arguments: Any) -> Any:
        allowed, answer = answers[name]
        if name == fails or arguments not in allowed:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)
        return answer

    for name in answers:
        monkeypatch.setattr(pynvml, f"nvml{name}", lambda *arguments, name=name: call(name, *arguments))


@pytest.mark.parametrize("device", ["3", "GPU-7f"])
def test_compute_capability(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_library(monkeypatch, "Init")
    assert compute_capability(device) is None  # without a driver
    use_library(monkeypatch)
    assert compute_capability(device) == (9, 0)


@pytest.mark.parametrize(
    ("allowed", "fails", "expected"),
    [
        (range(96), "", [{1, 3, 70}]),
        ({0, 1, 2, 70}, "", [{1, 70}]),  # limited by the user or a container
        ({0, 2}, "", []),
        (range(96), "DeviceGetCpuAffinity", []),
        (range(96), "DeviceGetHandleByUUID", []),
    ],
)
def test_a_process_stays_on_its_gpus_cores(
    allowed: Any, fails: str, expected: list[set[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    bound: list[set[int]] = []
    use_library(monkeypatch, fails)
    monkeypatch.setattr(gpus.os, "sched_getaffinity", lambda pid: set(allowed))
    monkeypatch.setattr(gpus.os, "sched_setaffinity", lambda pid, cores: bound.append(cores))
    stay_near("GPU-7f")
    assert bound == expected
