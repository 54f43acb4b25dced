"""After a process is killed, the run ends with one sentence, or continues and loses nothing.

A killed engine is replaced in test_conversations.py, and on the trainers' devices in test_killed_colocated_engines.py.
"""

import re
import threading
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from slime_like.data.ledger import audit_run
from tests.conftest import Tiny
from tests.end_to_end.test_train import steps_of
from tests.faults.quick import quick, running
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
        ("transformers", (), "critic rank 0", [*CRITIC, "separate"]),
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
