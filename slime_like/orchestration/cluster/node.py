"""The node that a worker runs on, as the cluster knows it."""

import os
import socket
import sys
import tempfile
from pathlib import Path

import ray

from slime_like.checks.environment import visible_device_problem
from slime_like.errors import SlimeLikeError
from slime_like.system.disk import open_log
from slime_like.system.network import interface_of


def node_address() -> str:
    """This node's address in the cluster."""
    address: str = ray.util.get_node_ip_address()
    return address


def session_directory() -> Path:
    """Directory of Ray's files of this cluster on this node."""
    this = ray.get_runtime_context().get_node_id()
    (socket_file,) = (node["RayletSocketName"] for node in ray.nodes() if node["NodeID"] == this)
    return Path(socket_file).parent.parent


def logs_directory() -> Path:
    """Where the logs of this cluster's processes on this node are, Ray's and the run's."""
    return session_directory() / "logs"


def require_own_devices() -> None:
    """Reject a node whose Ray shows every process all GPUs. Call before CUDA is initialised.

    Raises:
        SlimeLikeError: this process was given GPUs, and sees others.
    """
    given = ray.get_runtime_context().get_accelerator_ids().get("GPU")
    if given and (problem := visible_device_problem(os.environ)):
        raise SlimeLikeError(problem, code="visible-devices", who=f"node {node_address()}")


def use_session_directory() -> None:
    """Temporary files of this process and its children go with Ray's session, however they end.

    Engines make sockets and files that they leave behind. What torch compiles stays where it is found again.
    """
    caches = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{caches}/torchinductor")  # torch's default others can make
    os.environ["TMPDIR"] = str(session_directory())
    tempfile.tempdir = None  # what was found before


def use_log(role: str) -> Path:
    """Have all that this process and its children print go to ROLE.log among the cluster's logs; their directory.

    Ray's own files, named after worker ids, keep what was printed before. A process that takes the role of an earlier
    one writes to ROLE.2.log, the next to ROLE.3.log.
    """
    directory = logs_directory()
    with open_log(directory, role) as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())
    return directory


def use_cluster_interface(gloo: bool) -> None:
    """Have collectives of this process and its children go through the cluster's own network; what is set stays.

    Args:
        gloo: gloo, too; an engine's ranks share a host, and keep theirs on loopback.

    Raises:
        SlimeLikeError: no interface has the address that Ray uses.
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
    os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # NCCL would take every name that begins so
