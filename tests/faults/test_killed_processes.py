"""Killed and stopped processes end the run with one sentence, or are replaced."""

import re
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from slime_like.commands.main import main
from slime_like.data.ledger import audit_run
from slime_like.orchestration.cluster import stopped, worker_watch
from tests.conftest import Tiny
from tests.end_to_end.test_train import steps_of
from tests.faults.quick import quick, running, title
from tests.faults.test_failures import one_sentence
from tests.support.processes import Command

ACCEPTANCE = pytest.mark.acceptance
# vLLM renames its process, where the operating system lets it.
VLLM_CORE = ("VLLM::EngineCore", "multiprocessing.spawn")
_ENGINE_HANGS_S = 10.0
"""Longer than a rank's death stays unnoticed. The end of the run waits for the engine at most this long."""


GENERATION = ["--rollout.prompts_per_step", "32"]
CRITIC = ["--algorithm.advantage", "gae", "--critic.placement"]


@pytest.mark.parametrize(
    ("engine", "victim", "who", "flags"),
    [
        ("transformers", ("ray::TrainerRank",), "trainer rank 0", GENERATION),
        pytest.param("transformers", (), "critic rank 0", [*CRITIC, "separate"], marks=ACCEPTANCE),
        pytest.param("transformers", (), "critic rank 0", [*CRITIC, "shared"], marks=ACCEPTANCE),
        # tests/engines covers each engine's report. The run handles all of them alike.
        pytest.param("transformers", ("ray::EngineActor",), "engine 0 (transformers)", GENERATION, marks=ACCEPTANCE),
        pytest.param("vllm", VLLM_CORE, "engine 0 (vllm)", ["--sync.bucket_mb", "0.001"], marks=ACCEPTANCE),
        pytest.param("sglang", ("sglang::scheduler",), "engine 0 (sglang)", GENERATION, marks=ACCEPTANCE),
    ],
)
def test_a_killed_process_ends_the_run_with_one_sentence(
    tiny: Tiny, tmp_path: Path, engine: str, victim: tuple[str, ...], who: str, flags: list[str]
) -> None:
    """The sentence names the process and the phase. Trainers and critics have the same title, but other logs."""
    flags = ["--rollout.engine", engine, "--steps", "1000", "--rollout.max_engine_restarts", "0", *flags]
    with Command(quick(tiny, tmp_path / "run", *flags), tmp_path / "log") as command:
        command.wait_for_rows(tmp_path / "run")
        assert command.listening_addresses() <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}  # loopback only
        critics = (each for each in command.descendants() if _logs_to(each, "critic-0.log"))
        (command.named(*victim) if victim else next(critics)).kill()
        killed = time.monotonic()
        finished = command.finish(timeout_s=60)
    assert finished.code == 1
    assert finished.at - killed < 30
    sentence = one_sentence(finished)
    assert who in sentence
    assert " while " in sentence or ", " in sentence
    assert victim or "critic-0*.log in worker_logs" in sentence
    assert "raylet" not in finished.stdout + finished.stderr  # from Ray's message


def test_a_rank_killed_while_waiting_for_an_engine_is_reported_first(tiny: Tiny, tmp_path: Path) -> None:
    """An engine that joins a transport would wait minutes for the rank. It may be suspended as it becomes ready."""
    with Command(quick(tiny, tmp_path / "run"), tmp_path / "log") as command:
        engine = running(command, "ray::EngineActor.start")
        engine.suspend()
        answering = threading.Timer(_ENGINE_HANGS_S, engine.resume)
        answering.start()
        command.named("ray::TrainerRank").kill()
        finished = command.finish(timeout_s=90)
        answering.join()
    assert finished.code == 1
    phases = "waiting for the engines|opening the weight transport"
    assert re.search(f"trainer rank 0 died while ({phases}): ", one_sentence(finished))
    assert "its log is trainer-0*.log in worker_logs" in one_sentence(finished)


def test_a_reference_worker_killed_as_it_scores_is_replaced(tiny: Tiny, tmp_path: Path) -> None:
    """Groups wait for the successor of the only worker. Each is trained once, with reference logprobs."""
    flags = ["--steps", "4", "--rollout.prompts_per_step", "16", "--algorithm.kl.coef", "0.1"]
    run_dir = tmp_path / "run"
    with Command(quick(tiny, run_dir, *flags, "--reference.placement", "workers"), tmp_path / "log") as command:
        running(command, "ray::TrainerRank.score").kill()
        finished = command.succeed(timeout_s=240)
    assert "reference worker 0 left the logprob pool (" in finished.stderr
    assert "reference worker 0 was restarted" in finished.stderr
    assert role_logs(run_dir) == {"engine-0.log", "reference-0.log", "reference-0.2.log", "trainer-0.log"}
    audit = audit_run(run_dir)
    assert not audit.problems
    assert (audit.issued, audit.trained, audit.in_flight) == (4 * 16, 4 * 16, ())
    assert steps_of(run_dir)[-1]["train_actor_training/kl_loss"] > 0


def _logs_to(process: psutil.Process, name: str) -> bool:
    with suppress(OSError):  # it may have ended
        return Path(f"/proc/{process.pid}/fd/1").readlink().name == name
    return False


def role_logs(run_dir: Path) -> set[str]:
    """Return the names of logs of ranks, engines and reference workers."""
    roles = ("trainer-*.log", "engine-*.log", "reference-*.log")
    return {path.name for role in roles for path in (run_dir / "worker_logs").glob(role)}


ACTOR, RANK = "ray::EngineActor", "ray::TrainerRank"
TURNS = (f"{ACTOR}.generate", f"{RANK}.train_minibatch", f"{RANK}.next_bucket")
"""Calls that last only for a turn: sampling, training with the engine asleep, and a weight sync."""
ADAPTER = ["--model.lora.rank", "8", "--model.lora.sync", "adapter", "--trainer.optimizer.lr", "1e-2"]
"""A replaced engine gets only factors."""
STEPS, PROMPTS = 6, 16


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


def _impatient(arguments: Sequence[str]) -> int:
    """Run the command with short times. ``test_kill_campaign.py`` has the default ones."""
    worker_watch.LOOK_EVERY_S, stopped.REPORT_AFTER_S, stopped.END_AFTER_S = 0.5, 1.0, 3.0
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
