"""Devices and packages of this machine."""

import platform
import subprocess
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Self

import torch

PACKAGES = (
    "slime-like", "torch", "transformers", "megatron-core", "numpy", "triton", "pydantic", "ray", "vllm", "sglang",
    "transformer-engine", "flash-attn", "flash-attn-4", "ring-flash-attn", "nvidia-cudnn-cu13", "nvidia-nccl-cu13",
)  # fmt: skip
"""Distributions whose versions the report names."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What the parts are chosen by, and what the report names.

    Attributes:
        gpus: CUDA devices that torch sees.
        packages: versions of the installed ``PACKAGES``.
        device: the first GPU, its memory and driver; without one, the processor's architecture.
    """

    gpus: int
    packages: dict[str, str]
    device: str

    @classmethod
    def seen(cls) -> Self:
        found = {name: installed for name in PACKAGES if (installed := _installed(name)) is not None}
        gpus = torch.cuda.device_count()
        return cls(gpus, found, _gpu() if gpus else f"no CUDA device, {platform.machine()}")


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _gpu() -> str:
    """Read in a separate process: a context here would take memory from every part."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"{torch.cuda.device_count()} CUDA devices, unnamed: {error}"
    return answer.splitlines()[0]
