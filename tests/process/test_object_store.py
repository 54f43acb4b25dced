"""Size of the object store on a launched node."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from slime_like.orchestration.cluster.ray_node import RayNodeSpec


def test_a_node_of_a_launched_cluster_refuses_it_alike(tmp_path: Path) -> None:
    more = 2 * psutil.virtual_memory().total // 2**20
    spec = json.dumps(asdict(RayNodeSpec(0, "127.0.0.1", None, str(tmp_path), 1, more)))
    command = [sys.executable, "-m", "slime_like.orchestration.cluster.ray_process", spec]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and ended.stdout == ""
    assert ended.stderr.startswith(f"cluster.object_store_mb={more}: of this machine's memory ")
    assert list(tmp_path.iterdir()) == []
