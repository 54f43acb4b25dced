"""Collective reading of a checkpoint: a rank that finds damage must not leave the others in their next collective.

0.16 reads with torch's collective ``load_state_dict``, which raises any rank's error on every rank. 0.19 lets every
rank read independently.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from megatron.core.dist_checkpointing.strategies import torch as torch_strategy
from torch.distributed import checkpoint
from torch.distributed.checkpoint import StorageReader

from backends.megatron.installed import IS_NEW
from backends.megatron.patch import Patch, applied


@contextlib.contextmanager
def loading_together(reader: Callable[[Path], StorageReader]) -> Iterator[None]:
    """Inside, ``dist_checkpointing.load`` is collective and reads the directory with ``reader``."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(applied(Patch(torch_strategy, "_get_filesystem_reader", lambda path, **_: reader(path))))
        if IS_NEW:
            stack.enter_context(applied(Patch(torch_strategy, "checkpoint", SimpleNamespace(load=_load))))
        yield


def _load(state: dict[str, Any], reader: StorageReader, *, planner: Any, no_dist: bool) -> None:
    checkpoint.load(state, storage_reader=reader, planner=planner)
