"""Several runs in one Ray cluster, since its start takes most of a short run's time."""

import contextlib
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from slime_like.checks.check import require_valid
from slime_like.commands.main import main
from slime_like.config import RunConfig
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


def replay_together(replays: Iterable[Sequence[str]], directory: Path, timeout_s: float = 280.0) -> list[int]:
    """Run all of these ``slime-like replay CAPSULE FLAG...`` in one cluster, in order, and return their exit codes."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "replays.json").write_text(json.dumps([list(map(str, each)) for each in replays]))
    with Command([str(directory)], directory / "log", program=replay_all) as command:
        command.succeed(timeout_s)
    codes: list[int] = json.loads((directory / "codes.json").read_text())
    return codes


def replay_all(arguments: Sequence[str]) -> int:
    """Run the replays in ``replays.json``. Use it as ``Command(program=...)``."""
    directory = Path(arguments[0])
    replays = json.loads((directory / "replays.json").read_text())
    with shared_cluster(load_config(Path(replays[0][0], "config.yaml")), 8, directory / "worker_logs"):
        codes = [main(["replay", *each]) for each in replays]
    (directory / "codes.json").write_text(json.dumps(codes))
    return 0


@contextlib.contextmanager
def shared_cluster(config: RunConfig, slots: int, logs: Path) -> Iterator[None]:
    """Open every run of this process in one cluster."""
    names = itertools.count()
    with Cluster(config.cluster, logs, slots) as cluster:

        def shared(*_: Any) -> AbstractContextManager[Any]:
            return nullcontext(SimpleNamespace(run_name=f"{cluster.run_name}-{next(names)}"))

        opening.Cluster = shared  # type: ignore[assignment,misc]
        yield


def train_all(files: Sequence[str]) -> int:
    """Train the configurations one after the other. Use it as ``Command(program=...)``."""
    configs = [load_config(Path(file)) for file in files]
    slots = max(sum(pieces_of(config).bundles) for config in configs)
    with shared_cluster(configs[0], slots, Path(files[0]).parent / "worker_logs"):
        for config in configs:
            require_valid(config)  # it may continue an earlier one
            train(config)
    return 0
