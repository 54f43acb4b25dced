"""Engines on the trainers' devices are replaced when killed in any turn, and their requests are sampled again."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from slime_like.data.ledger import audit_run
from tests.conftest import Tiny
from tests.end_to_end.test_train import steps_of
from tests.faults.quick import quick
from tests.faults.test_failures import one_sentence
from tests.faults.test_killed_processes import VLLM_CORE
from tests.support.processes import Command

ACTOR, RANK = "ray::EngineActor", "ray::TrainerRank"
TURNS = {  # whose call, as Ray shows it in the title of the actor's process, lasts only for this turn
    "sampling": f"{ACTOR}.generate",
    "asleep": f"{RANK}.train_minibatch",
    "in a sync": f"{RANK}.next_bucket",
}
ADAPTER = ["--model.lora.rank", "8", "--model.lora.sync", "adapter", "--trainer.optimizer.lr", "1e-2"]
"""A replaced engine gets only factors."""
STEPS, PROMPTS = 8, 16
_RESTART_TIMEOUT_S = 180.0


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("engine", "victim", "turns", "to_its_end", "more"),
    [
        ("transformers", (ACTOR,), tuple(TURNS), True, []),
        ("transformers", (ACTOR,), ("in a sync",), True, ADAPTER),
        ("vllm", VLLM_CORE, ("asleep",), False, []),  # its actor lives on; a start takes much longer
        pytest.param("vllm", VLLM_CORE, tuple(TURNS), True, [], marks=pytest.mark.acceptance),
        pytest.param("vllm", VLLM_CORE, tuple(TURNS), True, ADAPTER, marks=pytest.mark.acceptance),
        pytest.param("sglang", ("sglang::scheduler",), tuple(TURNS), True, [], marks=pytest.mark.acceptance),
        pytest.param("sglang", ("sglang::scheduler",), tuple(TURNS), True, ADAPTER, marks=pytest.mark.acceptance),
    ],
)
def test_an_engine_killed_in_its_turn_or_the_trainers_is_replaced(
    tiny: Tiny,
    tmp_path: Path,
    engine: str,
    victim: tuple[str, ...],
    turns: tuple[str, ...],
    to_its_end: bool,
    more: list[str],
) -> None:
    """The only engine is killed once in each turn of one run. If not ``to_its_end``, Ctrl-C ends the run."""
    restarts, steps = str(len(turns)), STEPS if to_its_end else 1000
    flags = ["--rollout.engine", engine, "--cluster.placement", "colocated", "--rollout.max_engine_restarts", restarts]
    flags += ["--steps", str(steps), "--rollout.prompts_per_step", str(PROMPTS), "--sync.bucket_mb", "0.01"]
    flags += ["--sync.transport", "colocated", *more]
    run_dir = tmp_path / "run"
    with Command(quick(tiny, run_dir, *flags), tmp_path / "log") as command:
        command.wait_for("step 1/", timeout_s=180)
        for count, turn in enumerate(turns, start=1):
            with _held(command, TURNS[turn]):
                command.named(*victim).kill()
            command.wait_for(" was restarted (", _RESTART_TIMEOUT_S, count)
        if not to_its_end:
            command.wait_for_rows(run_dir, len(steps_of(run_dir)) + 3)
            command.interrupt()
        finished = command.finish(timeout_s=240)
    assert finished.code == (0 if to_its_end else 130), finished.stderr
    assert to_its_end or "interrupted" in one_sentence(finished)
    assert finished.left_behind == []
    assert finished.stderr.count(f"engine 0 ({engine}) was restarted (") == len(turns)
    audit = audit_run(run_dir)
    assert not audit.problems
    rows = steps_of(run_dir)
    if to_its_end:
        assert len(rows) == STEPS
        assert (audit.issued, audit.trained, audit.in_flight) == (STEPS * PROMPTS, STEPS * PROMPTS, ())
    assert audit.trained >= PROMPTS * len(rows)
    for row in rows:
        assert row["weights/probe_gap"] < 1e-4
        assert row["train_actor_training/engine_gap_max"] < 1e-4  # sampled with the previous step's weights
        assert row["rollout/staleness_max"] == 0


@contextmanager
def _held(command: Command, call: str) -> Iterator[None]:
    """Stop an actor in ``call``, which keeps the run in its turn."""
    process = _stopped_in(command, call)
    try:
        yield
    finally:
        if process.is_running():
            process.resume()


def _stopped_in(command: Command, call: str) -> psutil.Process:
    process = command.named(call.partition(".")[0])
    while True:
        assert command.process.poll() is None, command.output
        if process.cmdline()[:1] == [call]:
            process.suspend()
            if process.cmdline()[:1] == [call]:
                return process
            process.resume()
        time.sleep(0.001)
