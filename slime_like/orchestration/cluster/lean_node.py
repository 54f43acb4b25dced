"""Ray's processes of one node, without those that a run does not need, and outside of the driver's process group."""

import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

# Neither `ray.init` nor `ray start` can leave processes out, and start three times as long and listen with them.
import ray._private.node
import ray._private.utils
import ray._private.worker
from ray._private import services
from ray._private.parameter import RayParams
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

from slime_like.errors import SlimeLikeError
from slime_like.orchestration.cluster.orphan_reaper import ended_agent
from slime_like.system.disk import write_private

_LOOPBACK = "127.0.0.1"
_GCS_START_S, _LOOK_EVERY_MS = 120.0, 1000
VITAL = ("gcs_server", "raylet")
_TOKEN_SETTINGS = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN")


class LeanNode(ray._private.node.Node):
    """Neither an autoscaler's monitor, a server of pages and job requests, nor a log monitor."""

    def __init__(self, ray_params: RayParams, **options: Any) -> None:
        ray_params.update_if_absent(node_ip_address=_LOOPBACK)  # else Ray listens on all addresses
        ray_params.update(no_monitor=True, include_log_monitor=False)
        get_node, wait_for_port = services.get_node, ray._private.node.wait_for_persisted_port

        def get_living_node(*arguments: Any) -> Any:
            """Ray asks until its node is there, for 30 s, also where the node has ended."""
            if (died := self.ended_daemon()) is not None:
                raise SlimeLikeError(died, code="ray-died")
            return get_node(*arguments)

        def wait_for_living_port(*arguments: Any, timeout_ms: int) -> Any:
            """Ray waits 30 s for the GCS, on a busy machine too few, and also where it has ended."""
            deadline = time.monotonic() + max(timeout_ms / 1000, _GCS_START_S)
            while True:
                try:
                    return wait_for_port(*arguments, timeout_ms=_LOOK_EVERY_MS if timeout_ms else 0)
                except RuntimeError:
                    if (died := self.ended_daemon()) is not None:
                        raise SlimeLikeError(died, code="ray-died") from None
                    if not timeout_ms or time.monotonic() >= deadline:
                        raise

        with (
            _replaced(services, "ConsolePopen", _SeparateGroupProcess),
            _replaced(services, "get_node", get_living_node),
            _replaced(ray._private.node, "wait_for_persisted_port", wait_for_living_port),
        ):
            super().__init__(ray_params, **options)

    @classmethod
    def start(cls, head: bool, **parameters: Any) -> Self:
        """Start one that ends with this process; ``parameters`` as in ``RayParams``."""
        return cls(RayParams(**parameters), head=head, shutdown_at_exit=False, spawn_reaper=True)

    def start_api_server(self, **_: Any) -> None:
        """Start none."""

    def ended_daemon(self) -> str | None:
        """Which of Ray's vital daemons ended by itself, if one did; of a raylet that ended with its agent, that."""
        for kind, process in self.dead_processes():
            if kind in VITAL:
                agent = ended_agent(Path(self.get_logs_dir_path())) if kind == "raylet" else None
                since = f", since its {agent} had ended" if agent else ""
                return f"Ray's {kind} ended by itself with {process.returncode}{since}"
        return None


def own_node() -> LeanNode | None:
    """Return the node of the cluster that this process started, if it did."""
    node = ray._private.worker._global_node
    return node if isinstance(node, LeanNode) else None


class _SeparateGroupProcess(services.ConsolePopen):
    """Process of a daemon of Ray that gets no signal sent to the driver's process group.

    ``timeout`` and shells send SIGTERM to the whole group. Ray shields its daemons from SIGINT only; once they are
    gone, its driver waits a minute for them and then ends the process without any cleaning up. They still end with the
    driver: that is the kernel's business (``PR_SET_PDEATHSIG``), not the group's.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs, process_group=0)


@contextmanager
def lean_start() -> Iterator[None]:
    """Inside, a cluster that ``ray.init`` starts is a ``LeanNode`` on loopback."""
    with _replaced(ray._private.node, "Node", LeanNode):
        yield


@contextmanager
def own_token(directory: Path) -> Iterator[None]:
    """Inside, a cluster that this process starts asks for a new token, which is in a file of ``directory``.

    By default Ray takes one of the user for all clusters, from a file that others may read.
    """
    path = directory / "token"
    write_private(path, secrets.token_urlsafe(32))
    before = {name: os.environ.pop(name, None) for name in _TOKEN_SETTINGS}
    os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(path))
    _read_token_settings()
    try:
        yield
    finally:
        for name in _TOKEN_SETTINGS:
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in before.items() if value is not None})
        _read_token_settings()


def _read_token_settings() -> None:
    """Ray's core reads the variables once, and keeps the token that it found."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def own_signals() -> Iterator[None]:
    """Inside, Ray installs no handler of SIGTERM: that raises ``SystemExit``, and the signal is lost where that
    reaches a destructor or a fork's callback, which ignore exceptions."""
    with _replaced(ray._private.utils, "set_sigterm_handler", lambda _: None):
        yield


@contextmanager
def own_messages() -> Iterator[None]:
    """Inside, Ray starts no thread that prints a paragraph on every worker's death: the run says it in a sentence."""
    with _replaced(ray._private.worker, "listen_error_messages", lambda *_: None):
        yield


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    usual = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, usual)
