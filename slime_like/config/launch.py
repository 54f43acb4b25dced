"""Options of ``slime-like launch``, and the directory in which its nodes meet."""

import math
from dataclasses import dataclass
from pathlib import Path

from slime_like.errors import ConfigError

DEFAULT_PORT = 6380


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """The same on every node, but for ``node_rank`` and ``address``; ``slime-like launch --help`` describes them.

    Attributes:
        config: YAML file; ``None`` starts from the defaults.
        flags: of ``slime-like train``, the cluster's size among them.
        address: "" is the address on the way to ``head``.
        token_file: ``None`` is beside the run directory.
    """

    config: Path | None
    flags: tuple[str, ...]
    nodes: int
    node_rank: int
    head: str = ""
    address: str = ""
    port: int = DEFAULT_PORT
    token_file: Path | None = None
    nodes_timeout_s: float = 600.0
    ray_timeout_s: float = 120.0
    silence_s: float = 30.0
    stop_s: float = 60.0
    plan: bool = True

    def __post_init__(self) -> None:
        problems = []
        if self.nodes < 1:
            problems.append(f"--nodes={self.nodes} must be at least 1")
        elif not 0 <= self.node_rank < self.nodes:
            problems.append(f"--node_rank={self.node_rank} is not 0 to {self.nodes - 1}, with --nodes={self.nodes}")
        if self.nodes > 1 and not self.head:
            problems.append(f"--head is needed with --nodes={self.nodes}: node 0's address (HEAD_ADDR)")
        if not 1 <= self.port <= 65_535:  # 0 would be another one on every start
            problems.append(f"--port={self.port} must be 1024 to 65535")
        for name in ("nodes_timeout_s", "ray_timeout_s", "silence_s", "stop_s"):
            if not 0 < getattr(self, name) < math.inf:
                problems.append(f"--{name}={getattr(self, name):g} must be a number of seconds above 0")
        if problems:
            raise ConfigError(problems, code="option-range")

    @property
    def leads(self) -> bool:
        return self.node_rank == 0

    def token_path(self, run_dir: Path) -> Path:
        """File of Ray's token."""
        return self.token_file or launch_directory(run_dir) / "key"


def launch_directory(run_dir: Path) -> Path:
    """Beside the run directory, which may be moved aside."""
    return run_dir.with_name(f".{run_dir.name}.cluster")
