"""Process that holds this node's part of Ray. ``ray_node`` starts it, and ends it through standard input.

``ray start`` would also start an autoscaler monitor that listens on every interface, a server for remote clients, and a
log monitor. When killed, it leaves them running. Here, Ray's daemons always end with this process, and this process
ends with the pipe on its standard input.
"""

import json
import logging
import os
import select
import sys
from dataclasses import asdict
from pathlib import Path

from ray._private.parameter import RayParams

from slime_like.errors import LaunchError
from slime_like.orchestration.cluster.bundles import RANK_LABEL
from slime_like.orchestration.cluster.lean_node import LeanNode
from slime_like.orchestration.cluster.object_store import object_store_problem
from slime_like.orchestration.cluster.orphan_reaper import end_writers
from slime_like.orchestration.cluster.ray_node import RayNodeSpec, Ready
from slime_like.orchestration.cluster.ray_session import RAY_DIRECTORY, keep_logs_only

_LOOK_EVERY_S = 0.5


def main(spec: RayNodeSpec) -> int:
    """Start Ray, print ``Ready``, and wait until standard input or a daemon ends. Return the exit code."""
    directory = Path(spec.directory)
    node: LeanNode | None = None
    try:
        if problem := object_store_problem(spec.object_store_mb):
            raise LaunchError(problem, code="object-store-size")
        node = _start(spec)
        print(json.dumps(asdict(Ready(node.gcs_address, node.get_logs_dir_path()))), flush=True)
        died = _stay(node)
    except Exception as error:  # Ray can raise any class
        died = " ".join(str(error).split())[:300] or type(error).__name__
    finally:
        if node is not None:
            node.kill_all_processes(check_alive=False, allow_graceful=True)
        end_writers(lambda: [directory], os.getpid(), quiet_s=1.0)
        if node is not None and directory in (session := Path(node.get_session_dir_path())).parents:
            keep_logs_only(session)
    if died:
        print(died, file=sys.stderr)
    return int(bool(died))


def _start(spec: RayNodeSpec) -> LeanNode:
    parameters = RayParams(
        gcs_server_port=spec.port if spec.gcs is None else None,
        gcs_address=spec.gcs,
        redis_address=spec.gcs,
        node_ip_address=spec.address,
        node_name=spec.address,
        temp_dir=str(Path(spec.directory) / RAY_DIRECTORY),
        num_cpus=spec.slots,
        object_store_memory=spec.object_store_mb * 1024 * 1024,
        labels={RANK_LABEL: str(spec.rank)},
    )
    return LeanNode(parameters, head=spec.gcs is None, shutdown_at_exit=False, spawn_reaper=True)


def _stay(node: LeanNode) -> str:
    """Wait for standard input or a Ray daemon to end. Return a sentence about the daemon, or ""."""
    while not select.select([sys.stdin], [], [], _LOOK_EVERY_S)[0]:
        if (died := node.ended_daemon()) is not None:
            return died
    return ""


if __name__ == "__main__":
    logging.getLogger("ray").setLevel(logging.ERROR)
    sys.exit(main(RayNodeSpec(**json.loads(sys.argv[1]))))
