"""Failures end in one sentence and a nonzero exit code, and leave nothing running."""

import json
import signal
import socket
from pathlib import Path

import pytest

from slime_like.examples.tiny_model import make_tiny_model
from tests.conftest import Tiny
from tests.faults.quick import quick
from tests.support.processes import Command, Finished, run, succeed

RESUME = "slime-like: restart with --resume auto to resume from "
NO_CHECKPOINT = "slime-like: no checkpoint has been written "


def one_sentence(finished: Finished) -> str:
    """Return the error without a traceback: the last line of standard error, not counting the hint on resuming."""
    assert "Traceback" not in finished.stderr, finished.stderr
    assert finished.left_behind == []
    *_, before, last = "", *finished.stderr.strip().splitlines()
    return before if last.startswith((RESUME, NO_CHECKPOINT)) else last


@pytest.mark.parametrize(
    ("engine", "argument", "value"),
    [
        ("transformers", "attn_implementation", "none_such"),
        # The KV cache is too small for the context, which vLLM's other process finds.
        pytest.param("vllm", "kv_cache_memory_bytes", "1000", marks=pytest.mark.acceptance),
    ],
)
def test_an_engine_that_does_not_start(tiny: Tiny, tmp_path: Path, engine: str, argument: str, value: str) -> None:
    """tests/engines covers each engine's message. The run handles all of them alike."""
    flags = ["--rollout.engine", engine, f"--rollout.engine_args.{argument}", value]
    finished = run(tiny.rl_flags(tmp_path / "run", *flags), tmp_path / "log")
    assert finished.code == 1
    assert f"engine 0 ({engine}), starting: {engine} engine 0 did not start: " in one_sentence(finished)


def test_an_engine_that_cannot_update_the_weights_is_rejected_before_engines_start(tiny: Tiny, tmp_path: Path) -> None:
    """The engine could not start, so no start was tried."""
    make_tiny_model(tmp_path / "model", family="qwen3_moe")
    flags = ["--model.path", str(tmp_path / "model"), "--rollout.engine_args.kv_cache_memory_bytes", "1000"]
    finished = run(tiny.rl_flags(tmp_path / "run", *flags), tmp_path / "log")
    assert finished.code == 1
    assert one_sentence(finished).startswith("slime-like: rollout.engine=vllm: vLLM cannot update the weights of a mix")


@pytest.mark.parametrize(
    ("moment", "how", "engine"),
    [
        ("starting Ray", "ctrl-c", "sglang"),
        pytest.param("weight sync: ", "ctrl-c", "vllm", marks=pytest.mark.acceptance),
        ("checkpoint of step 1", "SIGTERM to its group", "transformers"),
        ("weight sync: ", "SIGTERM", "transformers"),  # after step 1, without a checkpoint
    ],
)
def test_an_interrupted_run_ends_everything(tiny: Tiny, tmp_path: Path, moment: str, how: str, engine: str) -> None:
    """``timeout`` signals the whole group. The last line says how to resume, or that there is no checkpoint."""
    every = "0" if "sync" in moment else "1"
    flags = tiny.rl_flags(tmp_path / "run", "--steps", "1000", "--rollout.engine", engine, "--checkpoint.every", every)
    with Command(flags, tmp_path / "log") as command:
        command.wait_for(moment, timeout_s=240)
        if how == "SIGTERM":
            command.process.terminate()
        else:
            command.interrupt(signal.SIGINT if how == "ctrl-c" else signal.SIGTERM)
        finished = command.finish(timeout_s=60)
    assert finished.code == 130
    assert "interrupted" in one_sentence(finished).lower()
    latest = (tmp_path / "run" / "checkpoints" / "latest").resolve()
    assert ("checkpoint" in moment) == (finished.stderr.splitlines()[-1] == f"{RESUME}{latest}")
    assert (NO_CHECKPOINT in finished.stderr) == ("sync" in moment)
    assert "SIGTERM" not in finished.stderr  # Ray's handler would print it


def test_a_taken_port_is_named(tiny: Tiny, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        finished = run(tiny.sft_flags(tmp_path / "run", "--trainer.rendezvous_port", str(port)), tmp_path / "log")
    assert finished.code == 1
    assert f"trainer rank 0, starting: trainer.rendezvous_port={port} is taken on 127.0.0.1" in one_sentence(finished)


def test_a_reward_worker_that_hangs_once(tiny: Tiny, tmp_path: Path) -> None:
    """The response loses its sample, and is reported."""
    functions = f"[{{name: 'tests.faults.rewards:hangs_once', options: {{marker: {tmp_path}/hung}}}}]"
    flags = ["--reward.functions", functions, "--reward.timeout_s", "1", "--steps", "1"]
    finished = succeed(quick(tiny, tmp_path / "run", *flags), tmp_path / "log")
    for when in ("step 1, reward", "all steps"):
        assert f"{when}: scoring failed for 1 of 32 responses (1 by timeout); they got reward 0" in finished.stderr
    (row,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert row["ref_actor_rewards/scoring_failures"] == 1
