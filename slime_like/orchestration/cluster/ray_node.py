"""This node's Ray processes: started, watched, and ended by process id."""

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from slime_like.config import RunConfig
from slime_like.errors import LaunchError
from slime_like.orchestration.cluster.bundles import slots_per_node
from slime_like.orchestration.cluster.place import Place
from slime_like.system.gpus import local_gpus
from slime_like.system.interrupts import raise_if_interrupted

_STOP_S = 30.0
_CHECKS = 3
_LOOK_EVERY_S = 0.2


@dataclass(frozen=True, slots=True)
class RayNodeSpec:
    """Specification of one Ray node.

    Attributes:
        gcs: ADDRESS:PORT of the head to join; ``None`` makes this node the head.
        directory: directory of its sockets and logs, on this host only.
        slots: CPU slots to offer; ``None`` is one per core.
        port: port of the GCS on the head; 0 is any free port.
    """

    rank: int
    address: str
    gcs: str | None
    directory: str
    slots: int | None
    object_store_mb: int
    port: int = 0


@dataclass(frozen=True, slots=True)
class Ready:
    """Address of the GCS and directory of the logs, reported once Ray runs."""

    gcs: str
    logs: str


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


def node_spec(config: RunConfig, nodes: int, place: Place, gcs: str | None, port: int) -> RayNodeSpec:
    """Return the specification of one of ``nodes`` nodes, in a new directory with a short path, as sockets need."""
    slots = None if local_gpus() else slots_per_node(config, nodes)
    directory = tempfile.mkdtemp(prefix="slime-", dir="/tmp")
    return RayNodeSpec(place.rank, place.address, gcs, directory, slots, config.cluster.object_store_mb, port)


class RayNode:
    """Context manager that runs Ray on this node. Nothing is left outside."""

    def __init__(self, spec: RayNodeSpec, environment: Mapping[str, str], timeout_s: float) -> None:
        self._spec = spec
        self._environment = environment
        self._timeout_s = timeout_s

    def __enter__(self) -> Self:
        # Not in the directory: processes that write there are killed at the end.
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "slime_like.orchestration.cluster.ray_process", json.dumps(asdict(self._spec))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=dict(self._environment),
            start_new_session=True,  # the launcher handles Ctrl-C on the terminal
        )
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # the kernel ends Ray's daemons with it
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()

    def wait_ready(self, watch: Callable[[], None] = lambda: None) -> Ready:
        """Wait until Ray runs. ``watch`` is called while waiting, and may raise.

        Raises:
            LaunchError: Ray did not start, or not in time.
        """
        output = self._process.stdout
        assert output is not None
        deadline = time.monotonic() + self._timeout_s
        while not select.select([output], [], [], _LOOK_EVERY_S)[0]:
            raise_if_interrupted()
            watch()
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"Ray did not start on {self._spec.address} within {self._timeout_s:.0f} s; its logs are "
                    f"in {self._spec.directory}",
                    code="ray-not-started",
                )
        line = output.readline()
        if not line:
            self._process.wait(_STOP_S)
            raise LaunchError(
                f"Ray did not start on {self._spec.address}: {self._last_output()}", code="ray-not-started"
            )
        return Ready(**json.loads(line))

    def problem(self) -> str | None:
        """Return why Ray has ended by itself, as a sentence, or ``None`` while it runs."""
        if self._process.poll() is None:
            return None
        return f"Ray ended on {self._spec.address} by itself: {self._last_output()}"

    def _last_output(self) -> str:
        with contextlib.suppress(OSError):
            self._log.seek(0)
            lines = [line.strip() for line in self._log if line.strip()]
            if lines:
                return f"{lines[-1]} (logs in {self._spec.directory})"
        return f"exit code {self._process.returncode} (logs in {self._spec.directory})"
