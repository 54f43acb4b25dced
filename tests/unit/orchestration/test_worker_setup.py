"""Setting a worker's variables: as Ray's own setup does, against which it is compared."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ray._private.workers import setup_worker

from slime_like.orchestration import worker_setup

_WORKER = """
import json, os, sys
print(json.dumps([sys.executable, sys.argv, {name: os.environ.get(name) for name in ("MINE", "PATH")}]))
"""


@pytest.mark.parametrize(
    "context",
    [
        {"env_vars": {"MINE": "3"}, "py_executable": sys.executable, "command_prefix": [], "java_jars": []},
        {"env_vars": {"MINE": "${PATH}:here"}},
        {"env_vars": {"MINE": "3"}, "command_prefix": ["export", "MINE=4", "&&"]},
        {},
    ],
    ids=["variables", "a variable of others", "a prefix", "nothing"],
)
def test_a_worker_gets_what_rays_own_setup_would_give_it(tmp_path: Path, context: dict[str, Any]) -> None:
    worker = tmp_path / "default_worker.py"
    worker.write_text(_WORKER)
    (tmp_path / "setup_worker.py").symlink_to(setup_worker.__file__)
    options = ["--node=a b", f"--serialized-runtime-env-context={json.dumps(context)}", "--language=PYTHON", "--x=$y"]

    def result(setup: str | None) -> Any:
        words = [sys.executable, setup, worker, *options]
        return json.loads(subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout)

    assert result(worker_setup.__file__) == result(setup_worker.__file__)


def test_another_language_is_left_to_ray() -> None:
    given = ["/ray/default_worker.py", "--language=CPP"]
    assert worker_setup.command(given) == ([sys.executable, "/ray/setup_worker.py", *given], {})
