"""A run that is killed and resumed ends like an uninterrupted one, with the same samples and metrics.

Its reference follows the policy and is on workers. A run on its saved rollouts, with the reference in the trainers,
gives the same metrics.
"""

import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from slime_like.checks.run_files import FINGERPRINT
from slime_like.data.dump import dump_path, load_trajectories
from slime_like.models.weight_files import fingerprint
from slime_like.observability.report.trace import write_trace
from slime_like.observability.timing import PHASES
from slime_like.orchestration.trainer.checkpoint import Checkpoint
from tests.conftest import Tiny
from tests.end_to_end.test_train import metrics_of, steps_of
from tests.support.other_user import OtherUser, Round, Targets
from tests.support.processes import Command
from tests.support.shared_cluster import train_together
from tests.support.traces import tracks_of

STEPS, SAVE, REFRESH = 8, 2, 3
SAME = ("loss", "policy_loss", "kl_loss", "ratios", "entropy", "grad_norm", "num_tokens")
BEHIND = ("--checkpoint.async_save", "true")
WORKERS = ("--reference.placement", "workers")


def flags(tiny: Tiny, root: Path, *more: str) -> list[str]:
    """Flags with the transformers engine, which starts fast."""
    return tiny.rl_flags(
        root / "run", "--rollout.engine", "transformers", "--steps", str(STEPS), "--checkpoint.every", str(SAVE),
        "--checkpoint.keep", "4",
        "--algorithm.minibatches", "1", "--algorithm.kl.coef", "0.1", "--reference.update_interval", str(REFRESH),
        "--trainer.optimizer.lr", "1e-3", *more,
    )  # fmt: skip


def whole_flags(tiny: Tiny, root: Path, *more: str) -> list[str]:
    return flags(tiny, root, *WORKERS, "--debug.save_rollouts", str(root / "rollouts"), *more)


@pytest.fixture(scope="module")
def uninterrupted(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of an uninterrupted run, and in ``again`` of one that trains on its rollouts from step 5.

    The second run has its reference in the trainers.
    """
    root = tmp_path_factory.mktemp("whole")
    kept = ["--debug.load_rollouts", str(root / "rollouts"), "--data.train", "none", "--evaluation.files", "none"]
    kept += ["--checkpoint.export_hf", "false", "--resume", str(root / "run" / "checkpoints" / "step-000004")]
    train_together([whole_flags(tiny, root), flags(tiny, root / "again", *kept)], root)
    return root


def assert_same(root: Path, whole: Path) -> None:
    for step in range(1, STEPS + 1):
        ours, theirs = (load_trajectories(dump_path(r / "rollouts", step)) for r in (root, whole))
        assert [t.sequence_id for t in ours] == [t.sequence_id for t in theirs]
        assert all(torch.equal(a.response_tokens, b.response_tokens) for a, b in zip(ours, theirs, strict=True))
    assert_same_metrics(root, whole, range(1, STEPS + 1))


def assert_same_metrics(root: Path, whole: Path, steps: range, rel: float | None = None) -> None:
    expected = {row["step"]: row for row in steps_of(whole / "run")}
    rows = steps_of(root / "run")  # a repeated step has several rows
    assert {row["step"] for row in rows} == set(steps) and set(expected) == set(range(1, STEPS + 1))
    for row in rows:
        for name in SAME:
            key = f"train_actor_training/{name}"
            assert row[key] == pytest.approx(expected[row["step"]][key], rel=rel, abs=1e-6), (row["step"], name)


def test_the_reference_is_refreshed_at_its_interval(uninterrupted: Path) -> None:
    kl = {row["step"]: abs(row["train_actor_training/kl_loss"]) for row in steps_of(uninterrupted / "run")}
    refreshed = range(1, STEPS + 1, REFRESH)
    assert max(kl[step] for step in refreshed) < 1e-9 < 1e-6 < min(kl[step] for step in kl.keys() - {*refreshed})


@pytest.fixture(scope="module")
def resumed(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[Round]]]:
    """Run that is killed twice and resumed to its end, and what another user obtained from its last start.

    Everybody can enter its directory, unlike pytest's.
    """
    root = Path(tempfile.mkdtemp())
    root.chmod(0o755)
    try:
        _kill_twice(tiny, root, tmp_path_factory.mktemp("logs"))
        yield root, _resume_beside_another_user(tiny, root)
    finally:
        shutil.rmtree(root)


def _kill_twice(tiny: Tiny, root: Path, logs: Path) -> None:
    """Kill the run during step 5, after the checkpoint of step 4. Kill it again while it saves step 6 in the
    background, before this save counts."""
    checkpoints = root / "run" / "checkpoints"
    with Command(whole_flags(tiny, root), logs / "first") as command:
        command.wait_for("checkpoint of step 4", timeout_s=120)
        command.kill()
        killed = command.finish(timeout_s=30)
    assert killed.code == -9 and killed.left_behind == []
    with Command(whole_flags(tiny, root, *BEHIND), logs / "again") as command:
        started, deadline = checkpoints / ".partial-step-000006" / "trainer", time.monotonic() + 120
        while not started.is_dir():
            assert command.process.poll() is None and time.monotonic() < deadline, command.output
            time.sleep(0.002)
        command.kill()
        killed = command.finish(timeout_s=30)
    assert killed.code == -9 and killed.left_behind == []
    assert "step-000004 after step 4" in killed.stderr and "checkpoint of step 6" not in killed.stderr


def _resume_beside_another_user(tiny: Tiny, root: Path) -> list[Round]:
    """Resume the run to its end. The other user, which needs root, starts when all processes are there."""
    other = OtherUser() if os.geteuid() == 0 else None
    with Command(whole_flags(tiny, root, *BEHIND), root / "log") as command:
        command.wait_for("weight sync: ", timeout_s=120)
        if other is not None:
            other.begin(_targets(command, root / "run"))
        finished = command.succeed(timeout_s=180)
    assert "step-000004 after step 4" in finished.stderr
    assert re.search(r"^step 5/8 \|.* accuracy \S+ \(step 0\)", finished.stderr, re.MULTILINE), finished.stderr
    return other.end() if other is not None else []


def _targets(command: Command, run_dir: Path) -> Targets:
    processes = command.descendants()
    listening = [
        connection.laddr.port
        for process in processes
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    ]
    makers = {str(process.pid) for process in processes}
    memory = [str(path) for path in Path("/dev/shm").glob("slime-*") if path.name.split(".")[1] in makers]
    session = (run_dir / "worker_logs").readlink().parent
    return Targets(str(run_dir), str(session), listening, [process.pid for process in processes], memory)


def test_the_timeline_has_every_start_and_the_seconds_of_the_metrics(resumed: tuple[Path, list[Round]]) -> None:
    """Steps after the checkpoint were made again by a later start."""
    run_dir = resumed[0] / "run"
    tracks = tracks_of(write_trace(run_dir, resumed[0] / "trace.json.gz")[0])
    rows = [row for row in metrics_of(run_dir) if "phases/train (s)" in row]
    spans, made = tracks["driver", "steps"], list[tuple[int, int]]()
    for step in (each for each in spans if each["name"].startswith("step ")):
        number, end = int(step["name"].partition(" ")[2]), step["ts"] + step["dur"] - 1e-3  # rounding; microseconds
        seconds = dict.fromkeys(PHASES, 0.0)
        for phase in (each for each in spans if each is not step and step["ts"] <= each["ts"] < end):
            seconds[phase["name"]] += phase["dur"] / 1e6
        same = [row for row in rows if row["step"] == number]
        known = [{phase: row[f"phases/{phase} (s)"] for phase in PHASES} for row in same]
        assert pytest.approx(seconds, abs=1e-5) in known
        made.append((step["args"]["start"], number))
    assert [number for start, number in made if start == 3] == [5, 6, 7, 8]
    assert {number for start, number in made if start == 1} >= {1, 2, 3}
    assert sum(each["name"] == "accumulate" for each in tracks["trainer rank 0", "phases"]) >= STEPS
    requests = [each for (process, _), own in tracks.items() if process == "engine 0" for each in own]
    assert all(each["args"]["tokens"] > 0 and each["args"]["versions"][0] <= STEPS for each in requests)
    assert len(tracks["weight sync", "updates"]) >= STEPS + 2 and tracks["rewards", "scoring"]
    assert tracks["reference worker 0", "scoring"]


def test_killed_twice_and_resumed_equals_uninterrupted(
    tiny: Tiny, resumed: tuple[Path, list[Round]], uninterrupted: Path
) -> None:
    root, _ = resumed
    checkpoints = root / "run" / "checkpoints"
    assert [row["step"] for row in steps_of(root / "run")].count(5) >= 2  # one row from each start
    assert_same(root, uninterrupted)
    assert (checkpoints / "latest").readlink() == Path("step-000008") and not list(checkpoints.glob(".partial*"))
    assert Checkpoint.read(checkpoints / "latest").state[FINGERPRINT] == fingerprint(tiny.model)


def test_another_user_obtains_nothing_from_a_living_run(resumed: tuple[Path, list[Round]]) -> None:
    """It tries Ray's directory, token, sockets and logs, ports, shared memory, processes, and the run's files."""
    _, rounds = resumed
    if not rounds:
        pytest.skip("needs root, to become another user")
    first = rounds[0]
    assert first.sees_run and first.other == []  # the attempts were made during the run
    assert [one for each in rounds for one in each.obtained] == []
    kinds = ("read token", "connect raylet", "read ledger", "open lock", "read /dev/shm/", "memory of ")
    assert all(any(name.startswith(kind) for name in first.refused) for kind in kinds), first.refused


def test_saved_rollouts_train_the_same_with_the_reference_in_the_trainers(uninterrupted: Path) -> None:
    """The resumed checkpoint has the reference of step 3, and a refresh follows after step 6."""
    assert len(steps_of(uninterrupted / "again" / "run")) == 4
    assert_same_metrics(uninterrupted / "again", uninterrupted, range(5, 9), rel=1e-4)
