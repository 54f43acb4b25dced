"""One rank of a world without the others: process groups that move nothing, in this process."""

import contextlib
from collections.abc import Callable, Iterator

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextlib.contextmanager
def fake_world(rank: int, world_size: int, leave: Callable[[], None]) -> Iterator[None]:
    """Be ``rank`` of ``world_size``: collectives return at once and do nothing; ``leave`` dissolves the groups."""
    dist.init_process_group("cpu:fake,cuda:fake,meta:fake", rank=rank, world_size=world_size, store=FakeStore())
    # Named for several kinds of devices, a group has no single kind, and torch warns when it is dissolved.
    world = dist.group.WORLD
    assert world is not None
    world._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    try:
        yield
    finally:
        leave()
