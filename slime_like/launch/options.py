"""What ``slime-like launch`` is told, and which node of which cluster that makes this one."""

from __future__ import annotations

import math
import socket
from dataclasses import dataclass, field
from pathlib import Path

from slime_like.errors import ConfigError
from slime_like.system.network import address_towards, interface_of, interfaces, is_loopback, resolve

DEFAULT_PORT = 6380
_RAYS_LOCALHOST = ("127.0.0.1", "::1")


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
        port: where node 0 awaits the others.
        key_file: the cluster's key; ``None`` is beside the run directory.
        gpus_per_node: devices that ``slime-like plan`` counts with; ``None`` counts this node's.
        nodes_timeout_s: bound on waiting for the nodes.
        ray_timeout_s: bound on Ray's start on a node.
        silence_s: a node that says nothing for so long is lost.
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
    key_file: Path | None = None
    gpus_per_node: int | None = None
    nodes_timeout_s: float = 600.0
    ray_timeout_s: float = 120.0
    silence_s: float = 30.0
    stop_s: float = 60.0
    plan: bool = True

    def __post_init__(self) -> None:
        problems = []
        if self.nodes < 1:
            problems.append(f"--nodes={self.nodes} is no cluster; give at least 1")
        elif not 0 <= self.node_rank < self.nodes:
            problems.append(f"--node_rank={self.node_rank} is not 0 to {self.nodes - 1}, with --nodes={self.nodes}")
        if self.nodes > 1 and not self.head:
            problems.append(f"--head is needed with --nodes={self.nodes}: node 0's address (HEAD_ADDR)")
        if not 1 <= self.port <= 65_535:  # 0 would be another one on every start, which no other node knows
            problems.append(f"--port={self.port} is no port; give 1024 to 65535")
        for name in ("nodes_timeout_s", "ray_timeout_s", "silence_s", "stop_s"):
            if not 0 < getattr(self, name) < math.inf:
                problems.append(f"--{name}={getattr(self, name):g} is no number of seconds above 0; give one")
        if problems:
            raise ConfigError(problems)

    @property
    def leads(self) -> bool:
        return self.node_rank == 0


@dataclass(frozen=True, slots=True)
class Place:
    """This node in its cluster.

    Attributes:
        rank: its number.
        host: its name.
        address: its address, on which everything of the run that others must reach listens.
        interface: name of the interface with that address.
        head: node 0's address.
    """

    rank: int
    head: str
    address: str
    interface: str
    host: str = field(default_factory=socket.gethostname)

    def __str__(self) -> str:
        return f"node {self.rank} ({self.host}, {self.address})"


def find_place(options: LaunchOptions) -> Place:
    """Resolve node 0's address and find our own.

    Raises:
        ConfigError: node 0's name is unknown, its address is not this host's (on node 0), cannot be reached from here,
            or is loopback although other nodes must reach it.
    """
    head = _resolved_head(options)
    own = options.address or (head if options.leads else _address_towards(head))
    if options.leads and own != head and not is_loopback(head):
        raise ConfigError(
            [f"HEAD_ADDR={options.head} is {head}, but on node 0 NODE_ADDR={own}; give every node the same HEAD_ADDR"]
        )
    try:
        interface = interface_of(own)
    except ValueError as error:
        raise ConfigError([f"NODE_ADDR={own} is no address ({error}); give a number such as 10.0.0.2"]) from error
    if interface is None:
        listed = ", ".join(address for address in interfaces() if not is_loopback(address)) or "loopback alone"
        if options.leads and not options.address:
            raise ConfigError(
                [
                    f"HEAD_ADDR={options.head} is {head}, which is no address of {socket.gethostname()} (it has "
                    f"{listed}); start NODE_RANK=0 on the node that has it, or give that node's address to all nodes"
                ]
            )
        raise ConfigError([f"NODE_ADDR={own} is no address of {socket.gethostname()}; it has {listed}"])
    return Place(options.node_rank, own if options.leads else head, own, interface)


def _resolved_head(options: LaunchOptions) -> str:
    try:
        head = resolve(options.head)
    except (OSError, UnicodeError) as error:  # the latter of what can be no name
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigError([f"HEAD_ADDR={options.head} cannot be resolved ({why}); give node 0's address"]) from error
    if is_loopback(head) and not is_loopback_name(options.head) and not options.address:
        raise ConfigError(
            [
                f"HEAD_ADDR={options.head} is {head} here, which no other node can reach; give the address that node 0 "
                "has in the cluster"
            ]
        )
    if head in _RAYS_LOCALHOST:
        raise ConfigError(
            [
                f"HEAD_ADDR={options.head}: Ray takes {head} for another address; give the one in the network "
                "(127.0.0.2, and a NODE_ADDR for each, for several nodes of one machine)"
            ]
        )
    return head


def is_loopback_name(host: str) -> bool:
    """Was loopback asked for in so many words? Then it is meant: several nodes of one machine."""
    try:
        return is_loopback(host)
    except ValueError:
        return False


def _address_towards(head: str) -> str:
    try:
        return address_towards(head)
    except OSError as error:
        raise ConfigError([f"HEAD_ADDR={head} cannot be reached from here ({error.strerror})"]) from error
