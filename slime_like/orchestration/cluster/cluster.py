"""The Ray cluster of a run: one of our own on loopback, or a running one that we join."""

from __future__ import annotations

import logging
import os
import socket
import uuid
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import ray
from ray._common.utils import get_default_ray_temp_dir
from ray._private import services

from slime_like.config import ClusterConfig
from slime_like.errors import SlimeLikeError
from slime_like.orchestration.cluster import orphan_reaper
from slime_like.orchestration.cluster.node import session_directory
from slime_like.orchestration.cluster.object_store import object_store_problem
from slime_like.orchestration.cluster.ray_helpers import replaced, without_dashboard
from slime_like.orchestration.cluster.ray_session import Sessions, link_logs, make_room, put_away
from slime_like.system.interrupts import raise_if_interrupted, take_signals_back
from slime_like.weights.transports.leftovers import SHARED_MEMORY, cleanup

_REACH_S = 10.0


class Cluster:
    """Context manager: Ray is up inside and, if started here, gone outside, whatever happened in between.

    Args:
        config: where the cluster is, or how large one of our own becomes.
        logs: becomes a link to the workers' logs, and in the end, in a cluster of our own, a directory with them.
        slots: CPU slots the run needs; a cluster of our own offers as many, however few cores the machine has.
        bucket_directories: where weight buckets lie besides shared memory.

    Attributes:
        run_name: unique; shared memory and weight buckets whose name begins with it are removed at the end.
    """

    def __init__(self, config: ClusterConfig, logs: Path, slots: int, bucket_directories: Sequence[Path] = ()) -> None:
        self._config = config
        self._bucket_directories = (SHARED_MEMORY, *(directory.resolve() for directory in bucket_directories))
        self._logs = logs
        self._slots = slots
        self._session: Path | None = None
        self.run_name = f"slime-{uuid.uuid4().hex[:12]}"

    def __enter__(self) -> Cluster:
        if ray.is_initialized():
            raise SlimeLikeError("Ray is already initialised in this process; call train() in a separate process")
        problem = object_store_problem(self._config.object_store_mb) if self._config.address is None else None
        if problem is not None:
            raise SlimeLikeError(problem)
        make_room(self._logs)
        if self._config.address is None:
            _stay_on_loopback()
        else:
            _require_reachable(self._config.address)
        sessions = Sessions.from_now_on(Path(get_default_ray_temp_dir()), os.getpid())
        self._guard = orphan_reaper.start(sessions, self._logs, self.run_name, self._bucket_directories)
        try:
            with _own_signals(), _limited_idle_workers(), _own_process_groups(), _without_error_listener():
                ray.init(**self._arguments())
            take_signals_back()
            raise_if_interrupted()
            self._session = session_directory()
            link_logs(self._session, self._logs)
        except Exception as error:  # Ray raises what it likes, Exception itself among it
            self._end(in_order=False)
            raise_if_interrupted()  # it may have made an error of Ctrl-C
            where = self._config.address or "on this machine"
            raise SlimeLikeError(f"cluster: Ray did not start ({where}): {error}") from error
        except BaseException:
            self._end(in_order=False)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(in_order=kind is None)

    def _end(self, in_order: bool) -> None:
        """Shut Ray down; after an interrupted start the orphan reaper looks once more."""
        ray.shutdown()
        cleanup(self.run_name, self._bucket_directories)
        if in_order:
            if self._session is not None and self._config.address is None:
                put_away(self._session, self._logs)
            orphan_reaper.dismiss(self._guard)
        else:
            orphan_reaper.hand_over(self._guard)

    def _arguments(self) -> dict[str, Any]:
        shared: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": True}
        if self._config.address is not None:
            return shared | {"address": self._config.address}
        return shared | {
            "address": "local",  # never an old cluster that happens to be running
            "_node_ip_address": "127.0.0.1",
            "include_dashboard": False,
            "num_cpus": max(self._slots, len(os.sched_getaffinity(0))),
            "object_store_memory": self._config.object_store_mb * 1024 * 1024,
            # Every actor here has a separate environment or starts at once: what idles in advance serves none.
            # Without the GCS nothing can go on, and Ray would wait a minute for it to come back.
            "_system_config": {"prestart_worker_first_driver": False, "gcs_rpc_server_reconnect_timeout_s": 15},
        }


def _own_signals() -> AbstractContextManager[None]:
    """Replace Ray's SIGTERM handler, which exits silently, or not at all where the exit is swallowed."""
    return replaced(ray._private.utils, "set_sigterm_handler", lambda handler: None)


@contextmanager
def _limited_idle_workers() -> Iterator[None]:
    """A cluster of our own neither grows, nor repeats the workers' words here, nor shows pages: ``ray.init`` starts a
    process for each, and has no argument that says no."""
    module = ray._private.parameter
    parameters = partial(module.RayParams, no_monitor=True, include_log_monitor=False)
    with replaced(module, "RayParams", parameters), without_dashboard():
        yield


def _without_error_listener() -> AbstractContextManager[None]:
    """Keep Ray's paragraphs on dead actors out of the terminal: its logs have them, the run reports one sentence."""
    return replaced(ray._private.worker, "listen_error_messages", lambda worker, stopped: None)


class _SeparateGroupProcess(services.ConsolePopen):
    """``Popen`` of Ray's daemons; see ``_own_process_groups``."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs, process_group=0)


def _own_process_groups() -> AbstractContextManager[None]:
    """Start Ray's daemons outside of the driver's process group, whose signals then reach the driver alone.

    ``timeout`` and shells send SIGTERM to the whole group. Ray shields its daemons from SIGINT only; once they are
    gone, its driver waits a minute for them and then ends the process without any cleaning up. They still end with the
    driver: that is the kernel's business (``PR_SET_PDEATHSIG``), not the group's.
    """
    return replaced(services, "ConsolePopen", _SeparateGroupProcess)


def _require_reachable(address: str) -> None:
    """Check the address before Ray does, which tries for minutes and then names another address."""
    host, separator, port = address.rpartition(":")
    if not separator:
        return  # "auto"
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACH_S).close()
    except (OSError, ValueError) as error:
        raise SlimeLikeError(
            f"cluster.address={address}: nothing answers there ({error}); give the HOST:PORT that `ray start --head` "
            "printed, or none to start a cluster on this machine"
        ) from error


def _stay_on_loopback() -> None:
    """Keep a cluster of our own out of the network.

    Ray replaces 127.0.0.1 by the machine's outward address and then listens on all of them, except on systems where it
    supports no clusters. This variable marks such a system, in this process and in those it starts.
    """
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    ray._private.ray_constants.ENABLE_RAY_CLUSTER = False
