"""Settings of torch's CUDA allocator in a trainer rank."""

from collections.abc import Iterator, Mapping

import torch

from slime_like.checks.environment import ALLOCATOR, expandable_segments

_EXPANDABLE = "expandable_segments:True"


def allocator_problems(transport: str, mapped: bool, environment: Mapping[str, str]) -> Iterator[str]:
    """Explain why engines could not map this rank's memory, if the run's ``transport`` has them do so (``mapped``).

    Expandable segments are shared by file descriptors, which Linux lets a process take only from descendants (Yama).
    """
    given = expandable_segments(environment)
    if given and mapped:
        yield (
            f"sync.transport={transport}: engines map memory of colocated trainers, which they cannot "
            f"with {given} in the environment; unset it, or use shared_memory"
        )


def use_expandable_segments(mapped: bool, environment: Mapping[str, str]) -> None:
    """Let the allocator's segments grow unless engines map them: packs of varying size then leave fewer holes.

    Keeps the user's settings.
    """
    if not mapped and not any(name in environment for name in ALLOCATOR):
        torch._C._accelerator_setAllocatorSettings(_EXPANDABLE)
