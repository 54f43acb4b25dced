"""Workers that hang without being stopped are reported within 75 s, and ended within their bound. Default times."""

import os
import time
from pathlib import Path

import pytest

from slime_like.data.ledger import audit_run
from tests.conftest import Tiny
from tests.faults.hangs import frozen
from tests.faults.quick import quick
from tests.faults.test_failures import one_sentence
from tests.support.processes import Command

REPORTED_S, FROZEN_S, HANG_TIMEOUT_S, LOOK_S = 75.0, 120.0, 90.0, 15.0
SLACK_S = 10.0
"""The machine may be busy."""


def _seconds_until(command: Command, text: str, since: float, timeout_s: float = 240.0) -> float:
    command.wait_for(text, timeout_s)
    return time.monotonic() - since


@pytest.mark.acceptance
def test_a_frozen_engine_is_replaced_and_a_frozen_rank_ends_the_run(tiny: Tiny, tmp_path: Path) -> None:
    """Both are in state D, so a signal cannot end them before they thaw."""
    run_dir = tmp_path / "run"
    flags = quick(tiny, run_dir, "--steps", "1000", "--rollout.prompts_per_step", "16", "--checkpoint.every", "5")
    with Command(flags, tmp_path / "log") as command:
        command.wait_for_rows(run_dir, count=4)
        with frozen(command.named("ray::EngineActor"), f"slime-like-{os.getpid()}-engine"):
            since = time.monotonic()
            reported = _seconds_until(command, "of engine-0 on 127.0.0.1 has shown no sign of life", since)
            ended = _seconds_until(command, "and is ended", since)
            command.wait_for("engine 0 (transformers) was restarted", timeout_s=90)
            command.wait_for_rows(run_dir, count=(run_dir / "metrics.jsonl").read_text().count("\n") + 2)
        assert 60 <= reported <= REPORTED_S + SLACK_S
        assert FROZEN_S <= ended <= FROZEN_S + LOOK_S + SLACK_S
        with frozen(command.named("ray::TrainerRank"), f"slime-like-{os.getpid()}-rank"):
            since = time.monotonic()
            reported = _seconds_until(command, "of trainer-0 on 127.0.0.1 has shown no sign of life", since)
            assert command.process.wait(240) == 1
            ended = time.monotonic() - since
        finished = command.finish(timeout_s=60)
    assert 60 <= reported <= REPORTED_S + SLACK_S
    assert FROZEN_S <= ended <= FROZEN_S + LOOK_S + 60 + SLACK_S
    said = one_sentence(finished)
    assert "of trainer-0 on 127.0.0.1 has shown no sign of life" in said and "[worker-hung]" in said
    assert not audit_run(run_dir).problems


@pytest.mark.acceptance
def test_a_rank_that_hangs_in_user_code_is_found_behind_its_peers(tiny: Tiny, tmp_path: Path) -> None:
    """It sleeps in a system call, and its threads run. The other rank waits for it in a collective."""
    run_dir, fifo = tmp_path / "run", tmp_path / "fifo"
    loss = f"{{name: 'tests.faults.hangs:HangsInFifo', fifo: {fifo}}}"
    flags = quick(
        tiny, run_dir, "--steps", "1000", "--trainer.parallel.data", "2", "--cluster.hang_timeout_s",
        str(HANG_TIMEOUT_S), "--algorithm.loss", loss, "--trainer.target_tokens_per_batch", "128",
    )  # fmt: skip
    with Command(flags, tmp_path / "log") as command:
        command.wait_for_rows(run_dir, count=5)
        os.mkfifo(fifo)
        since = time.monotonic()
        reported = _seconds_until(command, "of trainer-1 on 127.0.0.1 has made no progress in", since)
        assert command.process.wait(240) == 1
        ended = time.monotonic() - since
        finished = command.finish(timeout_s=60)
    assert finished.left_behind == []
    assert 60 <= reported <= REPORTED_S + 2 * SLACK_S  # the next step begins some seconds later
    assert HANG_TIMEOUT_S <= ended <= HANG_TIMEOUT_S + LOOK_S + 2 * SLACK_S
    said = one_sentence(finished)
    assert "of trainer-1 on 127.0.0.1 has made no progress in" in said and "trainer-0" not in said


@pytest.mark.acceptance
@pytest.mark.parametrize(
    ("engine", "core"), [("vllm", ("VLLM::EngineCore", "multiprocessing.spawn")), ("sglang", ("sglang::scheduler",))]
)
def test_an_engine_whose_core_is_frozen_is_replaced(
    tiny: Tiny, tmp_path: Path, engine: str, core: tuple[str, ...]
) -> None:
    """Its actor runs and answers, but no token comes."""
    run_dir = tmp_path / "run"
    bound = ["--cluster.hang_timeout_s", str(HANG_TIMEOUT_S)]
    with Command(
        quick(tiny, run_dir, "--rollout.engine", engine, "--steps", "1000", *bound), tmp_path / "log"
    ) as command:
        command.wait_for_rows(run_dir, count=5)
        with frozen(command.named(*core), f"slime-like-{os.getpid()}-core"):
            since = time.monotonic()
            reported = _seconds_until(command, "of engine-0 on 127.0.0.1 has made no progress in", since)
            ended = _seconds_until(command, "and is ended", since)
            command.wait_for(f"engine 0 ({engine}) was restarted", timeout_s=120)
            command.wait_for_rows(run_dir, count=(run_dir / "metrics.jsonl").read_text().count("\n") + 2)
        finished = command.finish(timeout_s=0)
    assert "(in state D: " in finished.stderr
    assert 60 <= reported <= REPORTED_S + 2 * SLACK_S
    assert HANG_TIMEOUT_S <= ended <= HANG_TIMEOUT_S + LOOK_S + 2 * SLACK_S
