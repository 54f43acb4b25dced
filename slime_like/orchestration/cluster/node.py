"""A node of the cluster: the one that a worker runs on, and this one with its rank and address in a launch."""

import os
import socket
import sys
import tempfile
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path

import ray

from slime_like.checks.packages import visible_device_problem
from slime_like.errors import ConfigError, SlimeLikeError
from slime_like.system import heartbeat
from slime_like.system.disk import open_log
from slime_like.system.network import address_towards, interface_of, interfaces, is_loopback

_used: list[FileIO] = []
"""This process's log, which stays open: ``open_log`` bounds it as long."""
HEARTBEATS = "heartbeats"
_RAYS_LOCALHOST = ("127.0.0.1", "::1")


def node_address() -> str:
    address: str = ray.util.get_node_ip_address()
    return address


def session_directory() -> Path:
    """Return the directory of the cluster's Ray files on this node."""
    this = ray.get_runtime_context().get_node_id()
    (socket_file,) = (node["RayletSocketName"] for node in ray.nodes() if node["NodeID"] == this)
    return Path(socket_file).parent.parent


def logs_directory() -> Path:
    return session_directory() / "logs"


def require_own_devices() -> None:
    """Reject a node where Ray shows all GPUs to every process. Call before CUDA is initialized.

    Raises ``SlimeLikeError`` if this process was given GPUs and sees others.
    """
    given = ray.get_runtime_context().get_accelerator_ids().get("GPU")
    if given and (problem := visible_device_problem(os.environ)):
        raise SlimeLikeError(problem, code="visible-devices", who=f"node {node_address()}")


def use_session_directory() -> None:
    """Put temporary files of this process and its children into Ray's session, which is always removed.

    Engines leave sockets and files behind. Code compiled by torch stays in its cache for later runs.
    """
    caches = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{caches}/torchinductor")  # others can create torch's default
    os.environ["TMPDIR"] = str(session_directory())
    tempfile.tempdir = None  # clear the cached value


def use_log(role: str) -> Path:
    """Redirect the output of this process and its children to ROLE.log, and return the log directory.

    The heartbeat of this process begins next to that directory.

    Ray's own files, named after worker ids, keep earlier output. A process that takes over a role writes to ROLE.2.log,
    the next one to ROLE.3.log.
    """
    directory = logs_directory()
    _used.append(file := open_log(directory, role))
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(file.fileno(), stream.fileno())
    heartbeat.start(directory.with_name(HEARTBEATS))
    return directory


def use_cluster_interface(gloo: bool) -> None:
    """Route collectives of this process and its children through the cluster's network. Existing settings stay.

    Args:
        gloo: whether to route gloo, too. An engine's ranks share a host and use gloo on loopback.

    Raises ``SlimeLikeError`` if no interface has the address that Ray uses.
    """
    address = node_address()
    interface = interface_of(address)
    if interface is None:
        raise SlimeLikeError(
            f"no network interface of {socket.gethostname()} has the address {address} that Ray uses for it",
            code="no-interface",
        )
    if gloo:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # "=": NCCL would otherwise match prefixes


@dataclass(frozen=True, slots=True)
class Place:
    """This node in its cluster.

    Attributes:
        address: its address. Everything that other nodes must reach listens there.
    """

    rank: int
    head: str
    address: str
    interface: str
    host: str = field(default_factory=socket.gethostname)

    def __str__(self) -> str:
        return f"node {self.rank} ({self.host}, {self.address})"

    def report(self, text: str) -> None:
        """Print a line on standard error."""
        print(f"[slime-like] node {self.rank}: {text}", file=sys.stderr, flush=True)


def find_place(rank: int, head_name: str, address: str) -> Place:
    """Resolve the addresses of node 0 and of this node.

    Args:
        head_name: address or name of node 0 (HEAD_ADDR).
        address: address of this node (NODE_ADDR); "" selects the address on the way to node 0.

    Raises ``ConfigError`` if node 0's name is unknown or cannot be reached; on node 0, its address is not this host's;
    or it is loopback although other nodes must reach it.
    """
    try:
        head = str(socket.getaddrinfo(head_name, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:  # UnicodeError: the text cannot be a name
        why = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"HEAD_ADDR={head_name} cannot be resolved ({why}); give node 0's address") from error
    if is_loopback(head) and head != head_name and not address:  # a numeric address means several nodes on one machine
        raise ConfigError(
            f"HEAD_ADDR={head_name} is {head} here, which no other node can reach; give the address that node 0 has in "
            "the cluster"
        )
    if head in _RAYS_LOCALHOST:
        raise ConfigError(
            f"HEAD_ADDR={head_name}: Ray takes {head} for another address; give the one in the network (127.0.0.2, and "
            "a NODE_ADDR for each, for several nodes of one machine)"
        )
    try:
        node = address or (head if rank == 0 else address_towards(head))
    except OSError as error:
        raise ConfigError(f"HEAD_ADDR={head} cannot be reached from here ({error.strerror})") from error
    if rank == 0 and node != head and not is_loopback(head):
        raise ConfigError(
            f"HEAD_ADDR={head_name} is {head}, but on node 0 NODE_ADDR={node}; give every node the same HEAD_ADDR"
        )
    try:
        interface = interface_of(node)
    except ValueError as error:
        raise ConfigError(f"NODE_ADDR={node} is not an address ({error}); give a number such as 10.0.0.2") from error
    if interface is None:
        listed = ", ".join(address for address in interfaces() if not is_loopback(address)) or "only loopback"
        if rank == 0 and not address:
            raise ConfigError(
                f"HEAD_ADDR={head_name} is {head}, which is not an address of {socket.gethostname()} (it has "
                f"{listed}); start NODE_RANK=0 on the node that has it, or give that node's address to all nodes"
            )
        raise ConfigError(f"NODE_ADDR={node} is not an address of {socket.gethostname()}; it has {listed}")
    return Place(rank, node if rank == 0 else head, node, interface)
