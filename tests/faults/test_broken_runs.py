"""Processes that die, disks that fill, files that change: bounded, one sentence, the last good checkpoint intact."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime_like.data.ledger import audit_run
from tests.conftest import Tiny
from tests.faults.test_failures import one_sentence
from tests.processes import Command, run


def quick(tiny: Tiny, run_dir: Path, *more: str) -> list[str]:
    """The transformers engine starts at once; no evaluation."""
    return tiny.rl_flags(run_dir, "--rollout.engine", "transformers", "--evaluation.files", "[]", *more)


# vLLM renames its process, where the operating system lets it.
VLLM_CORE = ("VLLM::EngineCore", "multiprocessing.spawn")


@pytest.mark.parametrize(
    ("engine", "victim", "who", "busy_with"),
    [
        ("transformers", ("ray::EngineActor",), "engine 0 (transformers)", "generation"),
        ("vllm", VLLM_CORE, "engine 0 (vllm)", "generation"),
        ("vllm", VLLM_CORE, "engine 0 (vllm)", "sync"),
        ("sglang", ("sglang::scheduler",), "engine 0 (sglang)", "generation"),
        ("transformers", ("ray::TrainerRank",), "trainer rank 0", "generation"),
    ],
)
def test_a_killed_process_ends_the_run_with_one_sentence(
    tiny: Tiny, tmp_path: Path, engine: str, victim: tuple[str, ...], who: str, busy_with: str
) -> None:
    """Killed at whatever the run is doing, mostly one thing; the sentence says who, and in which phase."""
    flags = ["--rollout.engine", engine, "--steps", "1000", "--rollout.max_engine_restarts", "0"]
    flags += ["--rollout.prompts_per_step", "32"] if busy_with == "generation" else ["--sync.bucket_mb", "0.001"]
    with Command(quick(tiny, tmp_path / "run", *flags), tmp_path / "log") as command:
        command.wait_for("starting", timeout_s=30)
        while not (tmp_path / "run" / "metrics.jsonl").exists() or not (tmp_path / "run" / "metrics.jsonl").read_text():
            assert command.process.poll() is None, command.output
            time.sleep(0.1)
        assert command.listening_addresses() <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}  # nobody else's business
        command.named(*victim).kill()
        killed = time.monotonic()
        finished = command.finish(timeout_s=60)
    assert finished.code == 1
    assert time.monotonic() - killed < 30
    sentence = one_sentence(finished)
    assert who in sentence
    assert " while " in sentence or ", " in sentence


@pytest.mark.parametrize(
    ("engine", "victim", "ahead"), [("transformers", ("ray::EngineActor",), 0), ("vllm", VLLM_CORE, 1)]
)
def test_a_killed_engine_is_replaced_and_no_group_is_lost(
    tiny: Tiny, tmp_path: Path, engine: str, victim: tuple[str, ...], ahead: int
) -> None:
    """The only engine: its requests wait for its successor, which has the weights of the day before it serves."""
    flags = ["--rollout.engine", engine, "--steps", "12", "--rollout.prompts_per_step", "16"]
    flags += ["--rollout.max_staleness", str(ahead), "--algorithm.importance_correction", "truncate"]
    run_dir = tmp_path / "run"
    with Command(quick(tiny, run_dir, *flags), tmp_path / "log") as command:
        command.wait_for("starting", timeout_s=30)
        while not (run_dir / "metrics.jsonl").exists() or not (run_dir / "metrics.jsonl").read_text():
            assert command.process.poll() is None, command.output
            time.sleep(0.02)
        command.named(*victim).kill()
        finished = command.finish(timeout_s=150)
    assert finished.code == 0, finished.stderr
    assert finished.left_behind == []
    assert f"engine 0 ({engine}) was started again (" in finished.stderr
    audit = audit_run(run_dir)
    assert audit.holds, audit.problems
    assert (audit.issued, audit.trained, audit.in_flight) == (12 * 16, 12 * 16, ())
    for row in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines()):
        assert row.get("weights/probe_gap", 0.0) < 1e-4
        assert row.get("rollout/staleness_max", 0) <= ahead


def test_a_taken_port_is_named(tiny: Tiny, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        flags = ["--trainer.rendezvous_port", str(port)]
        finished = run(quick(tiny, tmp_path / "run", *flags), tmp_path / "log")
    assert finished.code == 1
    assert f"trainer rank 0, starting: trainer.rendezvous_port={port} is taken on 127.0.0.1" in one_sentence(finished)


@pytest.mark.parametrize("function", ["hangs_once", "hangs_always"])
def test_a_hung_reward_worker(tiny: Tiny, tmp_path: Path, function: str) -> None:
    """One response costs its own sample, and is told; a function that always hangs ends the run."""
    options = f", options: {{marker: {tmp_path}/hung}}" if function == "hangs_once" else ""
    functions = f"[{{name: 'tests.faults.rewards:{function}'{options}}}]"
    flags = ["--reward.functions", functions, "--reward.timeout_s", "1", "--steps", "1"]
    finished = run(quick(tiny, tmp_path / "run", *flags), tmp_path / "log")
    if function == "hangs_always":
        assert finished.code == 1
        assert "no answer within reward.timeout_s=1 s for each of the first 8 responses" in one_sentence(finished)
        return
    assert finished.code == 0, finished.stderr
    assert finished.left_behind == []
    assert "step 1, reward: scoring failed for 1 of 32 responses (1 by timeout); they got reward 0" in finished.stderr
    (row,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert row["ref_actor_rewards/scoring_failures"] == 1


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for one checkpoint of the tiny model, not for two."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=11m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"mounting a tmpfs needs root: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.parametrize("behind", ["false", "true"])
def test_a_full_disk_at_save_leaves_the_last_good_checkpoint(
    tiny: Tiny, tmp_path: Path, small_disk: Path, behind: str
) -> None:
    run_dir = small_disk / "run"
    flags = ["--steps", "4", "--checkpoint.every", "1", "--logging.tensorboard", "false"]
    flags += ["--checkpoint.async_save", behind]
    finished = run(quick(tiny, run_dir, *flags), tmp_path / "log")
    assert finished.code == 1
    assert "could not be written" in one_sentence(finished) and "free space" in finished.stderr
    checkpoints = run_dir / "checkpoints"
    assert json.loads((checkpoints / "latest" / "state.json").read_text())["step"] == 1
    assert not list(checkpoints.glob(".partial*"))


def test_a_run_that_fails_keeps_the_checkpoint_that_was_written_meanwhile(tiny: Tiny, tmp_path: Path) -> None:
    """The save of step 2 is whole during step 3, which never ends."""
    checkpoints = tmp_path / "run" / "checkpoints"
    written = checkpoints / ".partial-step-000002" / "trainer" / "__0_0.distcp"
    functions = f"[{{name: 'tests.faults.rewards:fails_once_saved', options: {{file: {written}}}}}]"
    flags = ["--steps", "6", "--checkpoint.every", "2", "--checkpoint.async_save", "true"]
    finished = run(quick(tiny, tmp_path / "run", *flags, "--reward.functions", functions), tmp_path / "log")
    assert finished.code == 1
    assert "the run is to end here" in one_sentence(finished)
    assert "checkpoint of step 2:" not in finished.stderr
    assert json.loads((checkpoints / "latest" / "state.json").read_text())["step"] == 2
    assert (checkpoints / "latest" / "trainer" / "checksums.json").is_file()
    assert not list(checkpoints.glob(".partial*"))


def test_what_does_not_fit_the_checkpoint_is_refused_at_resume(tiny: Tiny, tmp_path: Path) -> None:
    """A data file that changed, and a checkpoint that lost bytes."""
    data = tmp_path / "train.jsonl"
    data.write_text((tiny.data / "train.jsonl").read_text())
    flags = ["--data.train", str(data), "--checkpoint.export_hf", "false"]
    assert run(quick(tiny, tmp_path / "run", *flags), tmp_path / "log-0").code == 0

    data.write_text(data.read_text() + json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    changed = run(quick(tiny, tmp_path / "run", *flags, "--steps", "3"), tmp_path / "log-1")
    assert changed.code == 1
    assert str(data) in one_sentence(changed) and "not that of the checkpoint" in changed.stderr

    data.write_text((tiny.data / "train.jsonl").read_text())
    largest = max((tmp_path / "run/checkpoints/latest/trainer").rglob("*"), key=lambda file: file.stat().st_size)
    whole = largest.read_bytes()
    middle = len(whole) // 2
    for damaged in (whole[:1000], whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]):
        largest.write_bytes(damaged)
        corrupt = run(quick(tiny, tmp_path / "run", *flags, "--steps", "3"), tmp_path / "log-2")
        assert corrupt.code == 1
        sentence = one_sentence(corrupt)
        assert "is damaged (__0_0.distcp: bytes " in sentence and "are not as written" in sentence
        assert sentence.endswith("resume from an older checkpoint in RUN_DIR/checkpoints")
