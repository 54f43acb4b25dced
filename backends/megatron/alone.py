"""One rank of a layout without the others: process groups that move nothing, in this process."""

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from megatron.core import tensor_parallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from backends.megatron import parallel
from backends.megatron.cpu_runtime import megatron_runtime
from slime_like.config import RunConfig

_NOTHING_MOVES = "cpu:fake,cuda:fake,meta:fake"


@contextlib.contextmanager
def alone_as(config: RunConfig, rank: int, on_meta: bool = False) -> Iterator[None]:
    """Be ``rank`` of the layout: collectives return at once and do nothing.

    Args:
        on_meta: what Megatron would make on a GPU gets a shape only; models can then be run.
    """
    world_size = config.trainer.parallel.world_size
    dist.init_process_group(_NOTHING_MOVES, rank=rank, world_size=world_size, store=FakeStore())
    # Named for several kinds of devices, a group has no single kind, and torch warns when it is dissolved.
    world = dist.group.WORLD
    assert world is not None
    world._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    try:
        with megatron_runtime(on_meta):
            parallel.build_groups(config, with_devices=False)
            if on_meta:
                tensor_parallel.model_parallel_cuda_manual_seed(config.seed)
            yield
    finally:
        parallel.leave()
