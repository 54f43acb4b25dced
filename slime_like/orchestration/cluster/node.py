"""The cluster node that a worker runs on."""

import os
import socket
import sys
import tempfile
from pathlib import Path

import ray

from slime_like.checks.packages import visible_device_problem
from slime_like.errors import SlimeLikeError
from slime_like.system.disk import open_log
from slime_like.system.network import interface_of


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

    Ray's own files, named after worker ids, keep earlier output. A process that takes over a role writes to ROLE.2.log,
    the next one to ROLE.3.log.
    """
    directory = logs_directory()
    with open_log(directory, role) as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())
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
