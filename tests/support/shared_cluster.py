"""Several runs in one Ray cluster, since its start takes most of a short run's time."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slime_like.checks.check import require_valid
from slime_like.config.reading.load import load_config
from slime_like.orchestration.cluster.bundles import pieces_of
from slime_like.orchestration.cluster.cluster import Cluster
from slime_like.orchestration.run import opening
from slime_like.train import train


def train_all(files: Sequence[str]) -> int:
    """Train the configurations one after the other. Use it as ``Command(program=...)``."""
    configs = [load_config(Path(file)) for file in files]
    for config in configs:
        require_valid(config)
    slots = max(sum(pieces_of(config).bundles) for config in configs)
    names = iter(range(len(configs)))
    with Cluster(configs[0].cluster, Path(files[0]).parent / "worker_logs", slots) as cluster:

        def shared(*_: Any) -> AbstractContextManager[Any]:
            return nullcontext(SimpleNamespace(run_name=f"{cluster.run_name}-{next(names)}"))

        opening.Cluster = shared  # type: ignore[assignment,misc]
        for config in configs:
            train(config)
    return 0
