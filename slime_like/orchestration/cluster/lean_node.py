"""Ray's processes on one node: only the ones that a run needs, in separate process groups, and a watch over them."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import psutil

# `ray.init` and `ray start` cannot leave processes out. With all of them, starting takes three times as long.
import ray._private.node
import ray._private.utils
import ray._private.worker
from ray._private import services
from ray._private.parameter import RayParams
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

from slime_like.errors import SlimeLikeError
from slime_like.orchestration.cluster.orphan_reaper import ended_agent
from slime_like.orchestration.cluster.ray_session import create_token
from slime_like.orchestration.cluster.stopped import Stopped, StopWatch, recently_ended, stopped_process

_LOOPBACK = "127.0.0.1"
_GCS_START_S = "60"
VITAL = ("gcs_server", "raylet")
_STORE_REMEDY = "lower cluster.object_store_mb, or give this machine or its /dev/shm more memory"
_AGENT = "RuntimeEnvAgent"
"""Agent without which no worker starts. A run does not need Ray's other agents to respond."""

_LOOK_EVERY_S = 0.5
_LOOKS_PER_STOP = 10
"""Checks for deaths per check for stops, which reads all processes of the host."""

_GRACE_S = 3.0
"""Time from a daemon's death to the interrupt. A failure that appears by itself in this time explains more."""

_FAILS_BEFORE_S = 0.5
"""Time that a daemon may outlive the first failure its death causes."""

_TOKEN_SETTINGS = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_TOKEN")


class LeanNode(ray._private.node.Node):
    """A Ray node without the autoscaler's monitor, the dashboard, and the log monitor.

    ``timeout`` and shells send SIGTERM to the whole process group of a command. Ray shields its daemons from SIGINT
    only, and its driver waits a minute for lost daemons and then ends without any cleanup. So each daemon gets its own
    process group. The kernel still ends it with its parent (``PR_SET_PDEATHSIG``).
    """

    def __init__(self, ray_params: RayParams, **options: Any) -> None:
        """Start the node.

        Raises ``SlimeLikeError`` if a daemon ended in the meantime, or there is no room for the object store.
        """
        ray_params.update_if_absent(node_ip_address=_LOOPBACK)  # otherwise Ray listens on all addresses
        ray_params.update(no_monitor=True, include_log_monitor=False)
        os.environ.setdefault("RAY_gcs_server_port_wait_time_s", _GCS_START_S)  # Ray's 30 s are short on a busy machine
        try:
            with mock.patch.object(services, "ConsolePopen", partial(services.ConsolePopen, process_group=0)):
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
                since = ended_agent(Path(self.get_logs_dir_path())) if kind == "raylet" else ""
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
        stack.enter_context(mock.patch.object(ray._private.utils, "set_sigterm_handler", lambda _: None))
        stack.enter_context(mock.patch.object(ray._private.worker, "listen_error_messages", lambda *_: None))
        if own:
            stack.enter_context(mock.patch.object(ray._private.node, "Node", LeanNode))
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


class DaemonWatch:
    """Thread that checks the daemons. A daemon that ends or is stopped ends the run by name.

    Without its raylet, a driver that waits for a lost worker's object waits forever. Without the GCS, Ray ends the
    driver after a while, and the driver cannot clean up. State calls and ``ray.put`` release the interpreter, so this
    thread runs while they hang. The driver cannot be interrupted then: once the stopped daemon is killed, Ray ends the
    driver, and the orphan reaper reports the daemon.

    Args:
        node: node of the daemons.
        note: called with sentences about stopped daemons, from that thread.

    Attributes:
        interrupted_for: daemon for whose end the watch has interrupted the main thread like Ctrl-C. Only a watch made
            there can.
    """

    def __init__(self, node: LeanNode, note: Callable[[str], None]) -> None:
        self._node, self._note = node, note
        self._watch = StopWatch()
        self._over = threading.Event()
        self._deciding = threading.Lock()
        self._may_interrupt = threading.current_thread() is threading.main_thread()
        self._thread = threading.Thread(target=self._run, name="daemons", daemon=True)
        self.interrupted_for: str | None = None
        self._deaf = self._may_interrupt and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        if self._deaf:  # scripts start background commands ("&") like this; only this watch's interrupt counts then
            signal.signal(signal.SIGINT, self._hear)
        self._thread.start()

    def close(self) -> None:
        """End the thread. If it interrupts just now, the run is ending already."""
        try:
            with self._deciding:
                self._over.set()
            self._thread.join()
        except KeyboardInterrupt:
            if self.interrupted_for is None:
                raise
            self._over.set()
        if self._deaf:
            signal.signal(signal.SIGINT, signal.SIG_IGN)

    def cause(self) -> str | None:
        """Return the daemon that caused a failure, if any. Wait a moment for one that is about to end.

        A daemon that interrupted the run is already known, since a busy machine may let the moment pass.
        """
        until = time.monotonic() + _FAILS_BEFORE_S
        while True:
            if (died := self.interrupted_for or self._node.ended_daemon()) is not None:
                ended = recently_ended(self._watch.ended.values(), time.monotonic())
                return f"{ended.reason}; {died}" if ended else died
            if time.monotonic() >= until:
                return next((f"{one} is stopped (SIGSTOP)" for one in self._stopped()), None)
            time.sleep(_LOOK_EVERY_S / 5)

    def end_stopped(self) -> None:
        """Kill stopped daemons: requests to them would never return."""
        for one in self._stopped():
            one.kill()

    def _run(self) -> None:
        looks = 0
        while not self._over.wait(_LOOK_EVERY_S):
            if looks % _LOOKS_PER_STOP == 0:
                notes, end = self._watch.look(list(self._stopped()), time.monotonic())
                for note in notes:
                    self._note(note)
                for one in end:
                    one.kill()
            looks += 1
            if (died := self._node.ended_daemon()) is not None:
                self._over.wait(_GRACE_S)
                with self._deciding:
                    if self._may_interrupt and not self._over.is_set():
                        self.interrupted_for = died
                        # The process could deliver its signal to a thread that is not running.
                        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                return

    def _hear(self, number: int, frame: FrameType | None) -> None:
        if self.interrupted_for is not None:
            raise KeyboardInterrupt

    def _stopped(self) -> Iterator[Stopped]:
        for kind in VITAL:
            for info in self._node.all_processes.get(kind, []):
                with suppress(psutil.NoSuchProcess):
                    daemon = psutil.Process(info.process.pid)
                    if found := stopped_process(daemon, "this host", f"Ray's {kind}"):
                        yield found
                    # A raylet's children are its agents and the workers. WorkerWatch checks the workers.
                    for child in daemon.children():
                        with suppress(psutil.NoSuchProcess):  # a child that ended must not hide its siblings
                            if _AGENT in " ".join(child.cmdline()):
                                agent = stopped_process(child, "this host", "Ray's runtime_env_agent")
                                yield from filter(None, [agent])
