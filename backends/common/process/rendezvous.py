"""Setup of a trainer rank's process: cores, CUDA allocator, and rendezvous with the other ranks."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from backends.common.process.agreement import read_plain_objects
from slime_like.checks.packages import ALLOCATOR, expandable_segments
from slime_like.config import TrainerConfig
from slime_like.errors import TrainerError
from slime_like.interfaces import RankPlacement
from slime_like.system.gpus import stay_near
from slime_like.system.network import listen
from slime_like.system.processes import keep_freed_memory
from slime_like.system.words import pluralize
from slime_like.weights.transport import gpu_uuid


def prepare_processor(trainer: TrainerConfig, placement: RankPlacement) -> None:
    """Apply ``trainer.cpu_threads``. By default, ranks share the cores of their node, or of their GPU's NUMA node.

    An offloaded optimizer computes on these threads.
    """
    share, on_cuda = share_of_cores(placement, len(os.sched_getaffinity(0))), torch.cuda.is_available()
    if on_cuda:
        stay_near(f"GPU-{gpu_uuid(placement.local_rank)}")
    torch.set_num_threads(trainer.cpu_threads or min(share, len(os.sched_getaffinity(0))))
    if not on_cuda:
        keep_freed_memory()


def share_of_cores(placement: RankPlacement, cores: int) -> int:
    return max(1, cores // (placement.ranks_on_node or placement.world_size))


def join_world(trainer: TrainerConfig, placement: RankPlacement, cuda_backend: str = "nccl") -> None:
    """Meet the other ranks of the configured layout, each on its device.

    Args:
        cuda_backend: torch's name of the collectives for CUDA devices; gloo is used elsewhere.

    Raises:
        TrainerError: the world's size differs from the layout's, or the other ranks did not arrive in time.
    """
    parallel = trainer.parallel
    if placement.world_size != parallel.world_size:
        raise TrainerError(
            f"the world has {pluralize(placement.world_size, 'rank')}, but tensor * pipeline * context * data is "
            f"{parallel.world_size}",
            code="world-size",
            who=f"rank {placement.rank}",
            phase="setup",
            remedy="start as many ranks as the layout has",
        )
    on_cuda = torch.cuda.is_available()
    if on_cuda:
        torch.cuda.set_device(placement.local_rank)
    start = timedelta(seconds=trainer.start_timeout_s)
    try:
        store = dist.PrefixStore(placement.key, _meet(placement, start))
    except (dist.DistError, RuntimeError, OSError) as error:
        where = placement.store or f"{placement.master_address}:{placement.master_port}"
        raise TrainerError(
            f"no rendezvous at {where} within {start.total_seconds():.0f} s ({error})",
            code="no-rendezvous",
            who=f"rank {placement.rank}",
            phase="setup",
            remedy="check that all ranks start and that the port is free",
        ) from error
    read_plain_objects()
    # No `device_id`: with it torch (2.13, 2.14: `_new_process_group_helper`) splits the world's communicator for every
    # group, and for a new gloo group only on ranks outside it, which would wait for the others.
    dist.init_process_group(
        cuda_backend if on_cuda else "gloo",
        store=store,
        rank=placement.rank,
        world_size=placement.world_size,
        timeout=timedelta(seconds=trainer.step_timeout_s),
    )


def _meet(placement: RankPlacement, timeout: timedelta) -> dist.Store:
    """Return a store that all ranks have opened."""
    if placement.store is not None:
        file = dist.FileStore(str(placement.store), placement.world_size)
        if file.add("opened", 1) == placement.world_size:
            file.set("all-opened", "")
        file.wait(["all-opened"], timeout)
        return file
    is_master = placement.rank == 0
    listener = listen(placement.master_address, placement.master_port) if is_master else None
    return dist.TCPStore(
        placement.master_address,
        placement.master_port,
        placement.world_size,
        is_master=is_master,
        timeout=timeout,
        # By default, the store would listen on every interface of the machine.
        master_listen_fd=None if listener is None else listener.detach(),
    )


def communicators() -> int:
    """Count the groups of several ranks that include this rank."""
    return sum(len(ranks) > 1 for ranks in dist.distributed_c10d._world.pg_group_ranks.values())


@contextlib.contextmanager
def fake_world(rank: int, world_size: int, leave: Callable[[], None]) -> Iterator[None]:
    """Act as ``rank`` of ``world_size``: collectives do nothing. ``leave`` dissolves the groups."""
    dist.init_process_group("cpu:fake,cuda:fake,meta:fake", rank=rank, world_size=world_size, store=FakeStore())
    # A group named for several kinds of devices has no single kind, and torch warns when it is dissolved.
    world = dist.group.WORLD
    assert world is not None
    world._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    try:
        yield
    finally:
        leave()


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
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
