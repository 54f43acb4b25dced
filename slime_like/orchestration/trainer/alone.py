"""Trainer ranks without engines or rewards, for commands that only score or verify."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from slime_like.config import RunConfig
from slime_like.errors import ConfigError
from slime_like.orchestration.cluster.placement import Placement
from slime_like.orchestration.trainer.calls import RankCalls, given
from slime_like.orchestration.trainer.group import TrainerGroup
from slime_like.orchestration.trainer.rank import TrainerRank


@contextmanager
def trainers_alone(config: RunConfig) -> Iterator[TrainerGroup]:
    """Reserve devices and launch ranks, without setting them up. Needs a running ``Cluster``; cleans up on exit."""
    with Placement(config, with_engines=False) as placement:
        trainers = TrainerGroup(config, placement)
        try:
            trainers.launch()
            yield trainers
        finally:
            trainers.shutdown()


def exported_tensors(
    ranks: RankCalls, begin: Callable[..., object] = TrainerRank.begin_export, *arguments: Any
) -> Iterator[dict[str, Tensor]]:
    """Yield the model under Hugging Face names, in buckets of at most ``sync.bucket_mb``, to this process.

    Args:
        begin: method of ``RankExport`` that starts the export of weights or gradients; gets ``arguments``.
    """
    phase = "exporting tensors"
    ranks.call(phase, begin, *arguments)
    while buckets := given(ranks.call(phase, TrainerRank.next_tensors)):
        yield from buckets


@contextmanager
def run_directory(path: Path, temporary: bool) -> Iterator[Path]:
    """Create ``path`` if needed. A temporary one is removed after success or a rejection. After a failure, it keeps the
    logs, and the exception gets a note that names it."""
    path.mkdir(mode=0o700 if temporary else 0o777, parents=True, exist_ok=not temporary)
    try:
        yield path
    except BaseException as error:
        if temporary and not isinstance(error, ConfigError):
            temporary = False
            error.add_note(f"the logs stay in {path}; remove it when they are read")
        raise
    finally:
        if temporary:
            shutil.rmtree(path)
