"""Ray on one node of a launch: a process that holds Ray's daemons, and the launcher's handle on it.

``ray start`` would also start an autoscaler monitor that listens on every interface, a server for remote clients, and a
log monitor. When killed, it leaves them running. Here, Ray's daemons always end with their process, and that process
ends with the pipe on its standard input.
"""

import json
import logging
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from ray._private.parameter import RayParams

from slime_like.errors import LaunchError
from slime_like.orchestration.cluster.bundles import RANK_LABEL
from slime_like.orchestration.cluster.lean_node import LeanNode
from slime_like.orchestration.cluster.node import Place
from slime_like.orchestration.cluster.orphan_reaper import end_writers
from slime_like.orchestration.cluster.ray_session import RAY_DIRECTORY, keep_logs_only
from slime_like.system.gpus import local_gpus
from slime_like.system.interrupts import raise_if_interrupted

_STOP_S = 30.0
_CHECKS = 3
_LOOK_EVERY_S = 0.2


def ray_environment(token_file: Path, silence_s: float) -> dict[str, str]:
    """Return the environment of Ray and the driver: token authentication, and checks that fail within ``silence_s``."""
    check_ms = round(1000 * silence_s / _CHECKS)
    kept = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "RAY_AUTH_TOKEN")}
    return kept | {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_file),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_health_check_initial_delay_ms": "1000",
        "RAY_health_check_period_ms": "1000",
        "RAY_health_check_failure_threshold": str(_CHECKS),
        "RAY_health_check_timeout_ms": str(max(500, check_ms - 1000)),
        # An idle connection, such as one that waits for a lost host, fails within two thirds of the bound.
        "RAY_grpc_client_keepalive_time_ms": str(check_ms),
        "RAY_grpc_client_keepalive_timeout_ms": str(check_ms),
    }


def node_parameters(slots: int, object_store_mb: int, place: Place, gcs: str | None, port: int) -> dict[str, Any]:
    """Return the ``RayParams`` of one node.

    Args:
        slots: CPU slots of a node without GPUs; see ``slots_per_node``.
        gcs: ADDRESS:PORT of the head to join; ``None`` makes this node the head.
        port: port of the head's GCS.
    """
    directory = tempfile.mkdtemp(prefix="slime-", dir="/tmp")  # paths of sockets must be short
    return {
        "gcs_server_port": port if gcs is None else None,
        "gcs_address": gcs,
        "redis_address": gcs,
        "node_ip_address": place.address,
        "node_name": place.address,
        "temp_dir": str(Path(directory, RAY_DIRECTORY)),
        "num_cpus": None if local_gpus() else slots,  # None: one per core
        "object_store_memory": object_store_mb * 2**20,
        "labels": {RANK_LABEL: str(place.rank)},
    }


class RayNode:
    """Context manager that runs Ray on this node. Nothing is left outside.

    Attributes:
        directory: directory of Ray's sockets and logs, on this host only.
    """

    def __init__(self, parameters: dict[str, Any], environment: Mapping[str, str], timeout_s: float) -> None:
        self._parameters = parameters
        self._environment = environment
        self._timeout_s = timeout_s
        self._address = parameters["node_ip_address"]
        self.directory = Path(parameters["temp_dir"]).parent

    def __enter__(self) -> Self:
        # Not in the directory: processes that write there are killed at the end.
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8")
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, json.dumps(self._parameters)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=dict(self._environment),
            start_new_session=True,  # the launcher handles Ctrl-C on the terminal
        )
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # the kernel ends Ray's daemons with it
            self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def wait_ready(self, watch: Callable[[], None] = lambda: None) -> None:
        """Wait until Ray runs. ``watch`` is called while waiting, and may raise.

        Raises ``LaunchError`` if Ray did not start, or not in time.
        """
        output = self._process.stdout
        assert output is not None
        problem, deadline = f"Ray did not start on {self._address}", time.monotonic() + self._timeout_s
        while not select.select([output], [], [], _LOOK_EVERY_S)[0]:
            raise_if_interrupted()
            watch()
            if time.monotonic() > deadline:
                late = f"{problem} within {self._timeout_s:.0f} s; its logs are in {self.directory}"
                raise LaunchError(late, code="ray-not-started")
        if not output.readline():
            self._process.wait(_STOP_S)
            raise LaunchError(f"{problem}: {self._last_output()}", code="ray-not-started")

    def problem(self) -> str | None:
        """Return why Ray has ended by itself, as a sentence, or ``None`` while it runs."""
        if self._process.poll() is None:
            return None
        return f"Ray ended on {self._address} by itself: {self._last_output()}"

    def _last_output(self) -> str:
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()]
        return f"{lines[-1] if lines else f'exit code {self._process.returncode}'} (logs in {self.directory})"


def hold(parameters: dict[str, Any]) -> str:
    """Start Ray, print a line, and wait for standard input or a daemon to end. Return the failure, or ""."""
    directory = Path(parameters["temp_dir"]).parent
    node: LeanNode | None = None
    try:
        is_head = parameters["gcs_address"] is None
        node = LeanNode(RayParams(**parameters), head=is_head, shutdown_at_exit=False, spawn_reaper=True)
        print("ready", flush=True)
        died = None
        while died is None and not select.select([sys.stdin], [], [], _LOOK_EVERY_S)[0]:
            died = node.ended_daemon()
        return died or ""
    except Exception as error:  # Ray can raise any class
        return " ".join(str(error).split())[:500] or type(error).__name__
    finally:
        if node is not None:
            node.kill_all_processes(check_alive=False, allow_graceful=True)
        end_writers(lambda: [directory], os.getpid(), quiet_s=1.0)
        if node is not None and directory in (session := Path(node.get_session_dir_path())).parents:
            keep_logs_only(session)


if __name__ == "__main__":
    logging.getLogger("ray").setLevel(logging.ERROR)
    sys.exit(hold(json.loads(sys.argv[1])) or 0)  # a sentence is printed on standard error, and the code is 1
