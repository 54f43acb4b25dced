"""Options of ``slime-like launch``, and the directory in which its nodes meet."""

import math
from dataclasses import dataclass
from pathlib import Path

from slime_like.errors import ConfigError

DEFAULT_PORT = 6380


@dataclass(frozen=True, slots=True)
class LaunchOptions:
    """The same on every node, but for ``node_rank`` and ``address``.

    Attributes:
        config: YAML file; ``None`` starts from the defaults.
        flags: of ``slime-like train``.
        nodes: how many nodes take part.
        node_rank: this one's number, from 0.
        head: node 0's address, or a name of it.
        address: this node's address in the cluster; "" is the one on the way to ``head``.
        port: of Ray's GCS on node 0.
        token_file: holds Ray's token; ``None`` is beside the run directory.
        gpus_per_node: devices that ``slime-like plan`` counts with; ``None`` counts this node's.
        nodes_timeout_s: bound on waiting for the nodes.
        ray_timeout_s: bound on Ray's start on a node.
        silence_s: a node that does not answer for so long is lost.
        stop_s: bound on the end of training once it has been asked to end.
        plan: run ``slime-like plan`` first.
    """

    config: Path | None
    flags: tuple[str, ...]
    nodes: int
    node_rank: int
    head: str = ""
    address: str = ""
    port: int = DEFAULT_PORT
    token_file: Path | None = None
    gpus_per_node: int | None = None
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
