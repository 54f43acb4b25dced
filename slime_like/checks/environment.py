"""Checks of environment variables that break runs on GPUs. Nothing imported here initializes devices."""

import os
from collections.abc import Iterator, Mapping

from slime_like.system.gpus import local_gpus

_SHOWS_ALL = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Settings of torch's allocator. The first that is set applies."""


def visible_device_problem(environment: Mapping[str, str]) -> str | None:
    """Return why processes would see other processes' devices, with the remedy, or ``None``."""
    value = environment.get(_SHOWS_ALL, "")
    if value.lower() not in ("1", "true"):
        return None
    return f"{_SHOWS_ALL}={value}: every process would see all GPUs and use the first one; unset it on every node"


def expandable_segments(environment: Mapping[str, str]) -> str | None:
    """Return the variable and value that make torch's allocator use expandable segments, or ``None``."""
    for name in ALLOCATOR:
        if name in environment:
            settings = environment[name].replace(" ", "").lower().split(",")
            return f"{name}={environment[name]}" if "expandable_segments:true" in settings else None
    return None


def device_problems() -> Iterator[str]:
    if local_gpus() and (problem := visible_device_problem(os.environ)):
        yield problem
