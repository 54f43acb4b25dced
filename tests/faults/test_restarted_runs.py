"""A run under ``--restarts`` is killed in three ways, comes back by itself, and ends like one that nobody disturbed."""

import json
import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from slime_like.data.dump import dump_path, load_trajectories
from slime_like.data.ledger import audit_run
from slime_like.observability.metrics import RESTARTS_FILE
from tests.conftest import Tiny
from tests.end_to_end.test_train import steps_of
from tests.faults.quick import quick
from tests.support.processes import Command

STEPS = 8
VICTIMS = {"killed": "run_child", "worker-died": "ray::TrainerRank", "ray-died": "raylet/raylet"}
"""Pattern of the command line, by the code of the cause."""


def _flags(tiny: Tiny, root: Path) -> list[str]:
    """One request at a time: the last digits of a product depend on the requests in a batch."""
    flags = {
        "steps": STEPS, "checkpoint.every": 2, "rollout.prompts_per_step": 16, "debug.save_rollouts": root / "rollouts",
        "rollout.engine_args": "{transformers: {max_batch_size: 1}}",
    }  # fmt: skip
    return quick(tiny, root / "run", *(part for name, value in flags.items() for part in (f"--{name}", str(value))))


def _find(command: Command, pattern: str, timeout_s: float = 120.0) -> psutil.Process:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and command.process.poll() is None:
        for process in command.descendants():
            if process.is_running() and re.search(pattern, " ".join(process.cmdline())):
                return process
        time.sleep(0.05)
    raise AssertionError(f"no {pattern}: {command.output}")


@pytest.mark.acceptance
@pytest.mark.timeout(900)
def test_a_run_that_is_killed_three_times_comes_back_by_itself(tiny: Tiny, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    with Command(_flags(tiny, whole), tmp_path / "log", forked=False) as command:
        command.succeed(timeout_s=300)
    with Command([*_flags(tiny, killed), "--restarts", "-1"], tmp_path / "killed-log", forked=False) as command:
        for number, pattern in enumerate(VICTIMS.values()):
            command.wait_for(f"checkpoint of step {2 * number + 2}", timeout_s=180)
            _find(command, pattern).send_signal(signal.SIGKILL)
            command.wait_for(f"restart {number + 1} in ", timeout_s=60)
        command.succeed(timeout_s=300)
    rows = [json.loads(line) for line in (killed / "run" / RESTARTS_FILE).read_text().splitlines()]
    assert [row["code"] for row in rows] == list(VICTIMS), rows
    assert [row["resumed_from"] for row in rows] == sorted(row["resumed_from"] for row in rows)
    for step in range(1, STEPS + 1):
        ours, theirs = (load_trajectories(dump_path(each / "rollouts", step)) for each in (killed, whole))
        assert [one.response_tokens.tolist() for one in ours] == [one.response_tokens.tolist() for one in theirs], step
    models = [(each / "run" / "hf" / "model.safetensors").read_bytes() for each in (killed, whole)]
    assert models[0] == models[1]
    assert {row["step"] for row in steps_of(killed / "run")} == set(range(1, STEPS + 1))
    audit = audit_run(killed / "run")
    assert not audit.problems and (audit.trained, audit.in_flight) == (STEPS * 16, ())
