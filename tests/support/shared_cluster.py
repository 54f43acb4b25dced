"""Several runs in one Ray cluster, since its start takes most of a short run's time."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slime_like.checks.check import require_valid
from slime_like.config.reading.load import load_config, save_config
from slime_like.orchestration.cluster.bundles import pieces_of
from slime_like.orchestration.cluster.cluster import Cluster
from slime_like.orchestration.run import opening
from slime_like.train import train
from tests.support.processes import Command


def train_together(runs: Iterable[Sequence[str]], directory: Path, timeout_s: float = 280.0) -> None:
    """Run all of these ``slime-like train FILE FLAG...`` in one cluster, in order. They must succeed."""
    files = []
    for number, (_, file, *flags) in enumerate(runs):
        files.append(directory / f"{number}.yaml")
        save_config(load_config(Path(file), flags), files[-1])
    with Command([str(file) for file in files], directory / "log", program=train_all) as command:
        command.succeed(timeout_s)


def train_all(files: Sequence[str]) -> int:
    """Train the configurations one after the other. Use it as ``Command(program=...)``."""
    configs = [load_config(Path(file)) for file in files]
    slots = max(sum(pieces_of(config).bundles) for config in configs)
    names = iter(range(len(configs)))
    with Cluster(configs[0].cluster, Path(files[0]).parent / "worker_logs", slots) as cluster:

        def shared(*_: Any) -> AbstractContextManager[Any]:
            return nullcontext(SimpleNamespace(run_name=f"{cluster.run_name}-{next(names)}"))

        opening.Cluster = shared  # type: ignore[assignment,misc]
        for config in configs:
            require_valid(config)  # it may continue an earlier one
            train(config)
    return 0
