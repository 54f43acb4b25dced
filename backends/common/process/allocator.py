"""Settings of torch's CUDA allocator in a trainer rank."""

from collections.abc import Iterator, Mapping

import torch

from slime_like.checks.environment import ALLOCATOR, expandable_segments
from slime_like.config import RunConfig
from slime_like.weights.transports.registry import AUTO, transport_of

_EXPANDABLE = "expandable_segments:True"


def engines_map_memory(config: RunConfig) -> bool:
    """Whether weights travel by ``cuda_ipc``: engines map the ranks' buffers."""
    if config.supervised or config.debug.load_rollouts is not None:
        return False
    chosen = config.sync.transport
    return (transport_of(config, on_cuda=True, num_hosts=1) if chosen == AUTO else chosen) == "cuda_ipc"


def allocator_problems(config: RunConfig, environment: Mapping[str, str]) -> Iterator[str]:
    """Why engines could not map this rank's memory.

    Such segments are shared by file descriptors, which Linux lets a process take of its descendants alone (Yama).
    """
    given = expandable_segments(environment)
    if given and engines_map_memory(config):
        yield (
            f"{given} in the environment: engines cannot map such memory by sync.transport=cuda_ipc; unset it, or use "
            "sync.transport=shared_memory"
        )


def use_expandable_segments(config: RunConfig, environment: Mapping[str, str]) -> None:
    """Let the allocator's segments grow: packs of ever other sizes leave fewer holes. What the user has set stays."""
    if not engines_map_memory(config) and not any(name in environment for name in ALLOCATOR):
        torch._C._accelerator_setAllocatorSettings(_EXPANDABLE)
