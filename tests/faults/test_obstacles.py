"""A port that is taken, a reward that hangs."""

import json
import socket
from pathlib import Path

from tests.conftest import Tiny
from tests.faults.quick import quick
from tests.faults.test_failures import one_sentence
from tests.support.processes import run


def test_a_taken_port_is_named(tiny: Tiny, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        flags = ["--trainer.rendezvous_port", str(port)]
        finished = run(tiny.sft_flags(tmp_path / "run", *flags), tmp_path / "log")
    assert finished.code == 1
    assert f"trainer rank 0, starting: trainer.rendezvous_port={port} is taken on 127.0.0.1" in one_sentence(finished)


def test_a_reward_worker_that_hangs_once(tiny: Tiny, tmp_path: Path) -> None:
    """One response costs its sample, and is reported."""
    functions = f"[{{name: 'tests.faults.rewards:hangs_once', options: {{marker: {tmp_path}/hung}}}}]"
    flags = ["--reward.functions", functions, "--reward.timeout_s", "1", "--steps", "1"]
    finished = run(quick(tiny, tmp_path / "run", *flags), tmp_path / "log")
    assert finished.code == 0, finished.stderr
    assert finished.left_behind == []
    assert "step 1, reward: scoring failed for 1 of 32 responses (1 by timeout); they got reward 0" in finished.stderr
    (row,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert row["ref_actor_rewards/scoring_failures"] == 1
