"""One rank of a layout without the others: process groups that move nothing, in this process."""

import contextlib
from collections.abc import Iterator

from megatron.core import tensor_parallel

from backends.common.process.rendezvous import fake_world
from backends.megatron import parallel
from backends.megatron.cpu_runtime import megatron_runtime
from slime_like.config import RunConfig


@contextlib.contextmanager
def alone_as(config: RunConfig, rank: int, on_meta: bool = False) -> Iterator[None]:
    """Be ``rank`` of the layout: collectives return at once and do nothing.

    Args:
        on_meta: what Megatron would make on a GPU gets a shape only; models can then be run.
    """
    with fake_world(rank, config.trainer.parallel.world_size, parallel.leave), megatron_runtime(on_meta):
        parallel.build_groups(config, with_devices=False)
        if on_meta:
            tensor_parallel.model_parallel_cuda_manual_seed(config.seed)
        yield
