"""Options of ``slime-like launch``, and the directory that its nodes share."""

import math
from dataclasses import dataclass
from pathlib import Path

from slime_like.errors import ConfigError

DEFAULT_PORT = 6380


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """Options of ``slime-like launch``, whose help describes them. Only ``node_rank`` and ``address`` differ by node.

    Attributes:
        flags: flags of ``slime-like train``, including the cluster's size.
        address: this node's address; "" means the address that routes to ``head``.
        token_file: ``None`` means a file next to the run directory.
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
            problems.append(f"--node_rank={self.node_rank} must be 0 to {self.nodes - 1}, with --nodes={self.nodes}")
        if self.nodes > 1 and not self.head:
            problems.append(f"--head is missing, with --nodes={self.nodes}; give node 0's address")
        if not 1 <= self.port <= 65_535:  # 0 would mean a different port at every start
            problems.append(f"--port={self.port} must be 1 to 65535")
        for name in ("nodes_timeout_s", "ray_timeout_s", "silence_s", "stop_s"):
            if not 0 < getattr(self, name) < math.inf:
                problems.append(f"--{name}={getattr(self, name):g} must be a number of seconds above 0")
        if problems:
            raise ConfigError(problems, code="option-range")

    def token_path(self, run_dir: Path) -> Path:
        """Return the file of Ray's token."""
        return self.token_file or launch_directory(run_dir) / "key"


def launch_directory(run_dir: Path) -> Path:
    """Return a directory next to the run directory, because that may be renamed."""
    return run_dir.with_name(f".{run_dir.name}.cluster")
