"""Failures end in one sentence or cost one sample; full disks and damaged files leave the last checkpoint intact."""

import json
import re
import shutil
import signal
import subprocess
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slime_like.data.dump import dump_path, load_trajectories, save_trajectories
from slime_like.data.ledger import audit_run
from tests.conftest import Tiny
from tests.end_to_end.test_train import steps_of
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
    said = one_sentence(finished)
    assert f"engine 0 ({engine}), starting: " in said and f"{engine} engine 0 did not start: " in said.replace(
        "vLLM", "vllm"
    )


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


def test_a_reward_worker_that_hangs_once(tiny: Tiny, tmp_path: Path) -> None:
    """The response is not trained, and is reported."""
    functions = f"[{{name: 'tests.faults.rewards:hangs_once', options: {{marker: {tmp_path}/hung}}}}]"
    flags = ["--reward.functions", functions, "--reward.timeout_s", "1", "--steps", "1"]
    finished = succeed(quick(tiny, tmp_path / "run", *flags), tmp_path / "log")
    for when, first in (("step 1, reward", ", first: tests.faults.rewards:hangs_once"), ("all steps", "")):
        assert f"{when}: scoring failed for 1 of 32 responses (1 by timeout{first}); 1 masked" in finished.stderr
    (row,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert row["ref_actor_rewards/scoring_failures"] == row["ref_actor_rewards/failures_masked"] == 1
    assert audit_run(tmp_path / "run").failed == {"masked: timeout": 1}
    table = tmp_path / "run" / "tables" / "per_sample_debug_table.jsonl"
    metadata = [json.loads(line)["Reward Metadata"] or "{}" for line in table.read_text().splitlines()]
    (failed,) = [each for each in map(json.loads, metadata) if "outcome" in each]
    assert failed == {"reason": "timeout", "function": "tests.faults.rewards:hangs_once", "outcome": "masked"}


@pytest.mark.acceptance
def test_a_rule_ends_a_run_after_a_checkpoint_and_tells_a_webhook(tiny: Tiny, tmp_path: Path) -> None:
    """The same command resumes, remembers the steps before, and is ended after one more."""
    run_dir, reward = tmp_path / "run", "[{name: 'tests.faults.rewards:always_one'}]"
    with Inbox() as inbox:
        threading.Thread(target=inbox.serve_forever, args=(0.02,), daemon=True).start()
        flags = quick(
            tiny, run_dir, "--steps", "50", "--reward.functions", reward, "--health.no_gradient", "2",
            "--health.stop_on", "[no_gradient]", "--health.webhook", f"http://127.0.0.1:{inbox.server_port}/",
        )  # fmt: skip
        for last in (2, 3):
            finished = run(flags, tmp_path / "log")
            assert finished.code == 1 and "[health-stop]" in one_sentence(finished)
            assert (run_dir / "checkpoints" / "latest").resolve().name == f"step-{last:06d}"
        inbox.shutdown()
    rows = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    assert inbox.rows == rows
    assert [(row["step"], row["rule"], row["severity"]) for row in rows] == [
        (2, "no_gradient", "warning"), (3, "no_gradient", "warning"),
    ]  # fmt: skip
    assert f"slime-like: restart with --resume auto to resume from {run_dir}" in finished.stderr


class Inbox(ThreadingHTTPServer):
    """Service that keeps what is posted."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Receipt)
        self.rows: list[dict[str, object]] = []


class _Receipt(BaseHTTPRequestHandler):
    server: Inbox

    def do_POST(self) -> None:
        self.server.rows.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


class Judge(ThreadingHTTPServer):
    """Service that rewards a response by its letters. While step 2 is sampled, it closes the connection for half."""

    def __init__(self, run_dir: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.metrics = run_dir / "metrics.jsonl"
        self.refused = Counter[tuple[str, str]]()

    @property
    def options(self) -> str:
        return f"{{url: 'http://127.0.0.1:{self.server_port}/', timeout_s: 0.3}}"

    def refuses(self, prompt: str, response: str) -> bool:
        steps = len(self.metrics.read_text().splitlines()) if self.metrics.exists() else 0
        if steps != 1 or sum(map(ord, response)) % 2:
            return False
        self.refused[prompt, response] += 1
        return True


class _Answer(BaseHTTPRequestHandler):
    server: Judge

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.refuses(body["prompt"], body["response"]):
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"reward": reward_of(body["response"])}).encode())

    def log_message(self, *_: object) -> None: ...


def reward_of(response: str) -> float:
    return sum(map(ord, response)) % 7 / 7


@pytest.mark.acceptance
def test_a_run_through_an_outage_equals_one_without_its_samples(tiny: Tiny, tmp_path: Path) -> None:
    """Weights are equal, bit for bit. The other run trains on what was scored, with advantages computed here."""
    with Judge(tmp_path / "run") as judge:
        threading.Thread(target=judge.serve_forever, args=(0.02,), daemon=True).start()
        flags = quick(
            tiny, tmp_path / "run", "--steps", "3", "--reward.functions", f"[{{name: http, options: {judge.options}}}]",
            "--reward.max_failed_fraction", "1", "--reward.workers", "4", "--debug.save_rollouts",
            str(tmp_path / "rollouts"),
        )  # fmt: skip
        succeed(flags, tmp_path / "log")
        judge.shutdown()
    audit, rows = audit_run(tmp_path / "run"), steps_of(tmp_path / "run")
    masked = [row["ref_actor_rewards/failures_masked"] for row in rows]
    assert masked[0] == masked[2] == 0 < masked[1] and len(judge.refused) > 0
    assert audit.failed == {"masked: timeout": masked[1]} and not audit.problems and audit.trained == 3 * 8
    for step in range(1, 4):
        trajectories = load_trajectories(dump_path(tmp_path / "rollouts", step))
        groups = defaultdict[int, list[float]](list)
        for row in trajectories:
            groups[row.group_id].append(float(row.rewards))
        for row in trajectories:
            rewards = torch.tensor(groups[row.group_id], dtype=torch.float64)
            spread = rewards.std() if float(rewards.max() - rewards.min()) > 1e-6 else torch.tensor(torch.inf)
            expected = ((float(row.rewards) - rewards.mean()) / spread).float().expand(row.response_len)
            assert torch.equal(row.advantages, expected)
            row.advantages, row.token_weight = expected, 1.0
        assert len(groups) == 8 and (len(trajectories) == 32) == (step != 2)
        save_trajectories(dump_path(tmp_path / "without", step), trajectories)
    kept = ["--run_dir", str(tmp_path / "other"), "--debug.load_rollouts", str(tmp_path / "without")]
    succeed([*flags, *kept, "--debug.save_rollouts", "none", "--data.train", "none"], tmp_path / "other-log")
    one, other = (load_file(tmp_path / name / "hf" / "model.safetensors") for name in ("run", "other"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    losses = [[row["train_actor_training/loss"] for row in steps_of(tmp_path / name)] for name in ("run", "other")]
    assert losses[0] == losses[1]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """File system with room for one checkpoint of the tiny model, not for two."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=11m", "tmpfs", str(disk)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"mounting a tmpfs needs root: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.parametrize("behind", [pytest.param("false", marks=pytest.mark.acceptance), "true"])
def test_a_full_disk_at_save_leaves_the_last_good_checkpoint(
    tiny: Tiny, tmp_path: Path, small_disk: Path, behind: str
) -> None:
    run_dir = small_disk / "run"
    flags = ["--steps", "4", "--checkpoint.every", "1", "--logging.tensorboard", "false"]
    flags += ["--checkpoint.async_save", behind]
    finished = run(tiny.sft_flags(run_dir, *flags), tmp_path / "log")
    assert finished.code == 1
    room = r"; \d+ of 11534336 bytes are free"
    refused = rf"could not be written \(No space left on device for \d+ bytes, the size of step-000001{room}\)"
    assert re.search(refused, one_sentence(finished)), finished.stderr
    assert "training continues, and the next save tries again" in finished.stderr
    assert [row["step"] for row in steps_of(run_dir)][-1] > 2
    checkpoints = run_dir / "checkpoints"
    assert json.loads((checkpoints / "latest" / "state.json").read_text())["step"] == 1
    assert not list(checkpoints.glob(".partial*"))


def test_a_run_that_fails_keeps_a_checkpoint_written_in_the_background(tiny: Tiny, tmp_path: Path) -> None:
    """The save of step 2 finishes during step 3, which never ends."""
    checkpoints = tmp_path / "run" / "checkpoints"
    written = checkpoints / ".partial-step-000002" / "trainer" / "__0_0.distcp"
    functions = f"[{{name: 'tests.faults.rewards:fails_once_saved', options: {{file: {written}}}}}]"
    flags = ["--steps", "6", "--checkpoint.every", "2", "--checkpoint.async_save", "true"]
    flags += ["--reward.functions", functions, "--reward.timeout_s", "60"]
    finished = run(quick(tiny, tmp_path / "run", *flags), tmp_path / "log")
    assert finished.code == 1
    assert "the run is to end here" in one_sentence(finished)
    assert "checkpoint of step 2:" not in finished.stderr
    assert json.loads((checkpoints / "latest" / "state.json").read_text())["step"] == 2
    assert (checkpoints / "latest" / "trainer" / "checksums.json").is_file()
    assert not list(checkpoints.glob(".partial*"))


def test_a_flipped_bit_is_rejected_at_resume_and_auto_resumes_from_the_previous_checkpoint(
    tiny: Tiny, trained: Path, tmp_path: Path
) -> None:
    """Only the ranks read whole checkpoints, after the run has started."""
    shutil.copytree(trained, tmp_path / "run", symlinks=True)
    checkpoint = tmp_path / "run" / "checkpoints" / "latest" / "trainer"
    largest = max(checkpoint.rglob("*"), key=lambda file: file.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    named = ["--resume", str(checkpoint.parent.resolve())]
    finished = run(tiny.sft_flags(tmp_path / "run", "--steps", "3", *named), tmp_path / "log")
    assert finished.code == 1
    sentence = one_sentence(finished)
    assert "is damaged (__0_0.distcp: bytes " in sentence and "are not as written" in sentence
    assert "; resume from a checkpoint before step-000002 [" in sentence
    finished = succeed(tiny.sft_flags(tmp_path / "run", "--steps", "3"), tmp_path / "log-auto")
    assert "passed over: " in finished.stderr and "step-000001 after step 1" in finished.stderr
    # Step 2 was run twice.
    assert [row["step"] for row in steps_of(tmp_path / "run")] == [1, 2, 2, 3]
