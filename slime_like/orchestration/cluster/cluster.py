"""Ray cluster of a run: a new one on loopback, or a running cluster that the run joins."""

import logging
import os
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import ray
from ray._private import services

from slime_like.config import ClusterConfig
from slime_like.errors import LIKELY_KILLER, SlimeLikeError, with_notes
from slime_like.orchestration.cluster import orphan_reaper
from slime_like.orchestration.cluster.lean_node import DaemonWatch, lean_start, own_node, own_token
from slime_like.orchestration.cluster.node import session_directory
from slime_like.orchestration.cluster.ray_session import (
    RAY_DIRECTORY,
    link_logs,
    make_private,
    make_room,
    put_away,
    remove_private,
)
from slime_like.orchestration.cluster.worker_watch import WorkerWatch
from slime_like.system.interrupts import raise_if_interrupted, take_interrupt, take_signals_back
from slime_like.weights.transports.names import SHARED_MEMORY, cleanup

_REACH_S = 10.0
_ANSWER_S = 30.0
_ASK = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1])"
"""Program that runs in a separate process, since the call has no bound."""


class Cluster:
    """Context manager for Ray. Ray runs inside; outside, a cluster started here is gone, whatever happened.

    Args:
        config: address of the cluster, or size of a new one.
        logs: path that links to the workers' logs; for a new cluster, a directory with these logs after the run.
        slots: CPU slots that the run needs; a new cluster offers at least this many, even with fewer cores.
        bucket_directories: directories of weight buckets besides shared memory.
        note: called with sentences about stopped and hanging workers, from another thread.

    Attributes:
        run_name: unique name; shared memory and weight buckets whose name starts with it are removed at the end.
    """

    def __init__(
        self,
        config: ClusterConfig,
        logs: Path,
        slots: int,
        bucket_directories: Sequence[Path] = (),
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._config = config
        self._bucket_directories = (SHARED_MEMORY, *(directory.resolve() for directory in bucket_directories))
        self._logs = logs
        self._slots = slots
        self._session: Path | None = None
        self._settings = ExitStack()
        self._note = note
        self._workers: WorkerWatch | None = None
        self._daemons: DaemonWatch | None = None
        self.run_name = f"slime-{uuid.uuid4().hex[:12]}"

    def __enter__(self) -> Self:
        if ray.is_initialized():
            raise SlimeLikeError(
                "Ray is already initialised in this process",
                code="ray-initialised",
                remedy="call train() in a separate process",
            )
        place = Path(os.environ.get("RAY_TMPDIR", tempfile.gettempdir()))
        orphan_reaper.remove_stale(place, self._logs)
        make_room(self._logs)
        if self._config.address is not None:
            _require_reachable(self._config.address)
        self._private = make_private(place)
        self._leftovers = (os.getpid(), self._private, self._logs, self.run_name, self._bucket_directories)
        self._guard = orphan_reaper.start(*self._leftovers)
        try:
            if self._config.address is None:
                self._settings.enter_context(own_token(self._private))
            with lean_start(own=self._config.address is None):
                ray.init(**self._arguments())
            take_signals_back()
            raise_if_interrupted()
            self._session = session_directory()
            link_logs(self._session, self._logs)
            self._workers = WorkerWatch(self._note, self._config.hang_timeout_s)
            if (node := own_node()) is not None:
                self._daemons = DaemonWatch(node, self._note)
        except Exception as error:  # Ray can raise any class, including Exception itself
            self._end(in_order=False)
            raise_if_interrupted()  # it may have turned Ctrl-C into an error
            where = self._config.address or "on this machine"
            remedy = "" if self._config.address else "check that memory and processor time are free, and start again"
            raise SlimeLikeError(
                f"Ray did not start ({where}): {error}", code="ray-not-started", who="cluster", remedy=remedy
            ) from error
        except BaseException:
            self._end(in_order=False)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        died = None
        if self._daemons is not None:
            self._daemons.close()
            interrupted = self._daemons.interrupted_for is not None
            died = self._daemons.cause() if isinstance(error, SlimeLikeError) or interrupted else None
            if interrupted:
                take_interrupt()
            self._daemons.end_stopped()
        ended = self._workers.close(died is None, str(error)) if self._workers is not None else None
        self._end(in_order=kind is None)
        if error is None:
            return
        then = f"; then: {error}" if isinstance(error, SlimeLikeError) else ""
        if died is not None:
            remedy = f"{LIKELY_KILLER}; its log is in {self._logs}"
            cause = SlimeLikeError(f"{died}{then}", code="ray-died", who="cluster", remedy=remedy)
        elif ended is not None and then:
            cause = SlimeLikeError(f"{ended.reason}{then}", code=ended.code, who="cluster")
        else:
            return
        raise with_notes(cause, error) from error

    def _end(self, in_order: bool) -> None:
        """Shut Ray down. After an interrupted start, the orphan reaper checks once more."""
        try:
            ray.shutdown()
            self._settings.close()
            cleanup(self.run_name, self._bucket_directories)
            if in_order and self._session is not None and self._config.address is None:
                put_away(self._session, self._logs)
            if in_order:
                remove_private(self._private)
        except BaseException:  # a second Ctrl-C
            in_order = False
            raise
        finally:
            if not orphan_reaper.dismiss(self._guard, in_order) and not in_order:
                orphan_reaper.clean_up(*self._leftovers)

    def _arguments(self) -> dict[str, Any]:
        shared: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": True}
        if self._config.address is not None:
            return shared | {"address": self._config.address}
        return shared | {
            "address": "local",  # never an old cluster that happens to be running
            "include_dashboard": False,
            "_temp_dir": str(self._private / RAY_DIRECTORY),
            "num_cpus": max(self._slots, len(os.sched_getaffinity(0))),
            "object_store_memory": self._config.object_store_mb * 1024 * 1024,
            # Idle workers would serve no actor: all have a separate environment or start immediately.
            # Nothing works without the GCS, and Ray would wait a minute for its return.
            "_system_config": {"prestart_worker_first_driver": False, "gcs_rpc_server_reconnect_timeout_s": 15},
        }


def _require_reachable(address: str) -> None:
    """Check the address first, since Ray tries for minutes. Ray resolves "auto" from a variable, the last cluster's
    file, or a running process. A cluster only answers clients with its token."""
    try:
        found = services.get_ray_address_from_environment(address, None)
        host, _, port = found.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), _REACH_S).close()
        subprocess.run([sys.executable, "-c", _ASK, found], check=True, capture_output=True, timeout=_ANSWER_S)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        is_silent = isinstance(error, subprocess.SubprocessError)
        raise SlimeLikeError(
            "the server there does not answer" if is_silent else f"nothing answers there ({error})",
            code="cluster-silent",
            who=f"cluster.address={address}",
            remedy="give the HOST:PORT that `ray start --head` printed, or none to start a cluster on this machine",
        ) from error
