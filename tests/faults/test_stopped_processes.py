"""Stopped processes are reported, and then ended or replaced."""

import signal
import time
from collections.abc import Sequence
from pathlib import Path

from slime_like.commands.main import main
from slime_like.data.ledger import audit_run
from slime_like.orchestration.cluster import stopped
from tests.conftest import Tiny
from tests.faults.quick import quick
from tests.faults.test_failures import one_sentence
from tests.support.processes import Command


def _impatient(arguments: Sequence[str]) -> int:
    """Run the command with short times. ``test_kill_campaign.py`` has the default ones."""
    stopped.LOOK_EVERY_S, stopped.REPORT_AFTER_S, stopped.END_AFTER_S = 0.5, 1.0, 3.0
    return main(arguments)


def test_a_stopped_rank_ends_the_run_and_a_stopped_engine_is_replaced(tiny: Tiny, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    flags = ["--steps", "1000", "--rollout.prompts_per_step", "16"]
    with Command(quick(tiny, run_dir, *flags), tmp_path / "log", program=_impatient) as command:
        command.wait_for_rows(run_dir)
        command.named("ray::EngineActor").send_signal(signal.SIGSTOP)
        command.wait_for("of engine-0 on 127.0.0.1 has been stopped (SIGSTOP)", timeout_s=30)
        command.wait_for("engine 0 (transformers) was restarted", timeout_s=60)
        command.wait_for_rows(run_dir, count=(run_dir / "metrics.jsonl").read_text().count("\n") + 2)
        rank = command.named("ray::TrainerRank")
        for _ in range(2):  # a process that continues in time is not ended
            rank.send_signal(signal.SIGSTOP)
            time.sleep(1.0)
            rank.send_signal(signal.SIGCONT)
            time.sleep(1.0)
        rank.send_signal(signal.SIGSTOP)
        finished = command.finish(timeout_s=60)
    assert finished.code == 1 and finished.left_behind == []
    assert "of trainer-0 on 127.0.0.1 had been stopped" in one_sentence(finished)
    assert not audit_run(run_dir).problems
