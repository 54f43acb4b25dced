"""Engines on the trainers' devices are replaced when killed in any turn, and their requests are sampled again."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from slime_like.data.ledger import audit_run
from tests.conftest import Tiny
from tests.end_to_end.test_train import steps_of
from tests.faults.quick import quick, running, title
from tests.faults.test_killed_processes import VLLM_CORE
from tests.support.processes import Command

ACTOR, RANK = "ray::EngineActor", "ray::TrainerRank"
TURNS = (f"{ACTOR}.generate", f"{RANK}.train_minibatch", f"{RANK}.next_bucket")
"""Calls that last only for a turn: sampling, training with the engine asleep, and a weight sync."""
ADAPTER = ["--model.lora.rank", "8", "--model.lora.sync", "adapter", "--trainer.optimizer.lr", "1e-2"]
"""A replaced engine gets only factors."""
STEPS, PROMPTS = 6, 16
ACCEPTANCE = pytest.mark.acceptance


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("engine", "victim", "more", "turns"),
    [
        ("transformers", (ACTOR,), [], TURNS[1:]),  # one killed as it samples: tests/end_to_end/test_conversations.py
        pytest.param("transformers", (ACTOR,), [], TURNS, marks=ACCEPTANCE),
        pytest.param("transformers", (ACTOR,), ADAPTER, TURNS, marks=ACCEPTANCE),
        pytest.param("vllm", VLLM_CORE, [], TURNS, marks=ACCEPTANCE),  # its actor lives on
        pytest.param("vllm", VLLM_CORE, ADAPTER, TURNS, marks=ACCEPTANCE),
        pytest.param("sglang", ("sglang::scheduler",), [], TURNS, marks=ACCEPTANCE),
        pytest.param("sglang", ("sglang::scheduler",), ADAPTER, TURNS, marks=ACCEPTANCE),
    ],
)
def test_an_engine_killed_in_its_turn_or_the_trainers_is_replaced(
    tiny: Tiny, tmp_path: Path, engine: str, victim: tuple[str, ...], more: list[str], turns: tuple[str, ...]
) -> None:
    """The only engine is killed once in each of the turns."""
    flags = ["--rollout.engine", engine, "--cluster.placement", "colocated", "--sync.transport", "colocated"]
    flags += ["--steps", str(STEPS), "--rollout.prompts_per_step", str(PROMPTS), "--sync.bucket_mb", "0.01"]
    run_dir, flags = tmp_path / "run", [*flags, "--rollout.max_engine_restarts", str(len(turns)), *more]
    with Command(quick(tiny, run_dir, *flags), tmp_path / "log") as command:
        command.wait_for("step 1/", timeout_s=180)
        for count, call in enumerate(turns, start=1):
            with _held(command, call):
                command.named(*victim).kill()
            command.wait_for(" was restarted (", 180, count)
        finished = command.succeed(timeout_s=240)
    assert finished.stderr.count(f"engine 0 ({engine}) was restarted (") == len(turns)
    audit = audit_run(run_dir)
    assert not audit.problems
    assert (audit.issued, audit.trained, audit.in_flight) == (STEPS * PROMPTS, STEPS * PROMPTS, ())
    rows = steps_of(run_dir)
    assert len(rows) == STEPS
    for row in rows:
        assert row["weights/probe_gap"] < 1e-4
        assert row["train_actor_training/engine_gap_max"] < 1e-4  # sampled with the previous step's weights
        assert row["rollout/staleness_max"] == 0


@contextmanager
def _held(command: Command, call: str) -> Iterator[None]:
    """Stop an actor in ``call``, which keeps the run in its turn."""
    while True:
        process = running(command, call)
        process.suspend()
        if title(process) == call:
            break
        process.resume()
    try:
        yield
    finally:
        if process.is_running():
            process.resume()
