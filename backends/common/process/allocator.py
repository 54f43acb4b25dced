"""Settings of torch's CUDA allocator in a trainer rank."""

from collections.abc import Iterator, Mapping

import torch

from slime_like.checks.environment import ALLOCATOR, expandable_segments
from slime_like.config import RunConfig

_MAPPING = ("auto", "colocated")
"""Values of ``sync.transport`` that let colocated engines map device memory."""
_EXPANDABLE = "expandable_segments:True"


def engines_map_memory(config: RunConfig) -> bool:
    """Return whether engines may map the ranks' buffers: on the same devices, ``auto`` chooses such a transport."""
    if config.supervised or config.debug.load_rollouts is not None:
        return False
    return config.cluster.placement == "colocated" and config.sync.transport in _MAPPING


def allocator_problems(config: RunConfig, environment: Mapping[str, str]) -> Iterator[str]:
    """Explain why engines could not map this rank's memory.

    Expandable segments are shared by file descriptors, which Linux lets a process take only from descendants (Yama).
    """
    given = expandable_segments(environment)
    if given and engines_map_memory(config):
        yield (
            f"sync.transport={config.sync.transport}: engines map memory of colocated trainers, which they cannot "
            f"with {given} in the environment; unset it, or use shared_memory"
        )


def use_expandable_segments(config: RunConfig, environment: Mapping[str, str]) -> None:
    """Let the allocator's segments grow: packs of varying size then leave fewer holes. Keeps the user's settings."""
    if not engines_map_memory(config) and not any(name in environment for name in ALLOCATOR):
        torch._C._accelerator_setAllocatorSettings(_EXPANDABLE)
