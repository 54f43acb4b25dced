"""Ray's processes on one node: only the ones that a run needs, in separate process groups."""

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

# `ray.init` and `ray start` cannot leave processes out. With all of them, starting takes three times as long.
import ray._private.node
import ray._private.utils
import ray._private.worker
from ray._private import services
from ray._private.parameter import RayParams
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

from slime_like.errors import SlimeLikeError
from slime_like.orchestration.cluster.orphan_reaper import ended_agent
from slime_like.orchestration.cluster.token import create_token

_LOOPBACK = "127.0.0.1"
_GCS_START_S = "60"
VITAL = ("gcs_server", "raylet")
_STORE_REMEDY = "lower cluster.object_store_mb, or give this machine or its /dev/shm more memory"
_TOKEN_SETTINGS = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN")


class LeanNode(ray._private.node.Node):
    """A Ray node without the autoscaler's monitor, the dashboard, and the log monitor.

    ``timeout`` and shells send SIGTERM to the whole process group of a command. Ray shields its daemons from SIGINT
    only, and its driver waits a minute for lost daemons and then ends without any cleanup. So each daemon gets its own
    process group. The kernel still ends it with its parent (``PR_SET_PDEATHSIG``).
    """

    def __init__(self, ray_params: RayParams, **options: Any) -> None:
        """Start the node.

        Raises:
            SlimeLikeError: a daemon ended in the meantime, or there is no room for the object store.
        """
        ray_params.update_if_absent(node_ip_address=_LOOPBACK)  # otherwise Ray listens on all addresses
        ray_params.update(no_monitor=True, include_log_monitor=False)
        os.environ.setdefault("RAY_gcs_server_port_wait_time_s", _GCS_START_S)  # Ray's 30 s are short on a busy machine
        try:
            with _replaced(services, "ConsolePopen", partial(services.ConsolePopen, process_group=0)):
                super().__init__(ray_params, **options)
        except Exception as error:  # Ray can raise Exception itself
            if (died := self.ended_daemon()) is not None:
                raise SlimeLikeError(died, code="ray-died") from error
            if "object store" in str(error):
                raise SlimeLikeError(str(error), code="object-store-size", remedy=_STORE_REMEDY) from error
            raise

    def start_api_server(self, **_: Any) -> None:
        """Do nothing."""

    def ended_daemon(self) -> str | None:
        """Return the vital Ray daemon that ended by itself, if any, with the agent that a raylet ended with."""
        for kind, process in self.dead_processes():
            if kind in VITAL:
                agent = ended_agent(Path(self.get_logs_dir_path())) if kind == "raylet" else None
                since = f", since its {agent} had ended" if agent else ""
                return f"Ray's {kind} ended by itself with {process.returncode}{since}"
        return None


def own_node() -> LeanNode | None:
    """Return the node of a cluster that this process started, or ``None``."""
    node = ray._private.worker._global_node
    return node if isinstance(node, LeanNode) else None


@contextmanager
def lean_start(own: bool) -> Iterator[None]:
    """Change what ``ray.init`` does inside.

    Ray installs no handler of SIGTERM: its handler raises ``SystemExit``, which destructors and a fork's callbacks
    ignore, so the signal would be lost. Ray prints no paragraph on every worker's death: the run reports it in a
    sentence. With ``own``, the cluster it starts is a ``LeanNode`` on loopback.
    """
    with ExitStack() as stack:
        stack.enter_context(_replaced(ray._private.utils, "set_sigterm_handler", lambda _: None))
        stack.enter_context(_replaced(ray._private.worker, "listen_error_messages", lambda *_: None))
        if own:
            stack.enter_context(_replaced(ray._private.node, "Node", LeanNode))
        yield


@contextmanager
def own_token(directory: Path) -> Iterator[None]:
    """Require a new token, from a file in ``directory``, for a cluster that this process starts inside.

    By default, Ray uses one token per user for all clusters, from a file that others may read.
    """
    create_token(path := directory / "token")
    before = {name: os.environ[name] for name in _TOKEN_SETTINGS if name in os.environ}
    _use_token({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(path)})
    try:
        yield
    finally:
        _use_token(before)


def _use_token(settings: Mapping[str, str]) -> None:
    """Set the variables. Ray's core would otherwise read them only once."""
    for name in _TOKEN_SETTINGS:
        os.environ.pop(name, None)
    os.environ.update(settings)
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    usual = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, usual)
