"""A parent that restarts its child, with real processes of a scripted child."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from slime_like.commands.main import main
from slime_like.errors import ConfigError, TrainerError
from slime_like.launch.restarts import CAUSE_FILE, ENDED, Restarts
from slime_like.observability.metrics import RESTARTS_FILE
from tests.process.conftest import wait_until

CHILD = """
import json, os, sys, time
root, run_dir = sys.argv[1:3]
log = os.path.join(root, "starts")
with open(log, "a") as file:
    file.write(json.dumps(sys.argv[3:]) + "\\n")
act = json.load(open(os.path.join(root, "acts")))[len(open(log).readlines()) - 1]
if act.get("moves"):
    os.rename(run_dir, run_dir + ".1")
os.makedirs(os.path.join(run_dir, "checkpoints"), exist_ok=True)
for step in act.get("rows", []):
    with open(os.path.join(run_dir, "metrics.jsonl"), "a") as file:
        file.write(json.dumps({"step": step, "train_actor_training/loss": 0.0}) + "\\n")
for step in act.get("saves", []):
    place = os.path.join(run_dir, "checkpoints", f"step-{step:06d}")
    if os.path.exists(place):
        os.rename(place, os.path.join(run_dir, f"old-{time.time_ns()}"))
    os.mkdir(place)
    latest = os.path.join(run_dir, "checkpoints", "latest")
    if os.path.lexists(latest):
        os.unlink(latest)
    os.symlink(os.path.basename(place), latest)
if "cause" in act:
    code, sentence = act["cause"]
    with open(os.environ["SLIME_LIKE_CAUSE_FILE"], "w") as file:
        json.dump({"code": code, "sentence": sentence}, file)
if "signal" in act:
    os.kill(os.getpid(), act["signal"])
sys.exit(act["code"])
"""
"""One start of a run, as the next entry of ``acts`` describes it. Appends its arguments to ``starts``."""

Run = Callable[..., tuple[int, list[list[str]], list[dict[str, Any]]]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Restart a child with these acts. Return the exit code, the arguments of every start, and the record."""
    run_dir = tmp_path / "run"

    def started(*acts: dict[str, Any], resume: str = "auto", limit: int = -1, **more: Any) -> Any:
        (tmp_path / "acts").write_text(json.dumps(acts))
        (tmp_path / "starts").unlink(missing_ok=True)
        given = {"arguments": ["first"], "again": ["again"], "first_wait_s": 0.001, **more}
        code = Restarts(run_dir, resume=resume, limit=limit, command=_command(tmp_path), **given).run()
        record = run_dir / RESTARTS_FILE
        rows = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
        return code, [json.loads(line) for line in (tmp_path / "starts").read_text().splitlines()], rows

    return started


def _command(root: Path) -> Callable[[Any], list[str]]:
    return lambda arguments: [sys.executable, "-S", "-c", CHILD, str(root), str(root / "run"), *arguments]


KILL = {"signal": signal.SIGKILL, "code": 0}
DONE = {"code": 0}


def fault(code: str = "unexpected", **more: Any) -> dict[str, Any]:
    return {"code": 1, "cause": [code, f"because of {code} {more}"], **more}


def test_a_run_comes_back_from_its_newest_checkpoint_until_it_is_done(run: Run) -> None:
    """Kills, a lost rank and a bug at different steps. Every restart is a row."""
    acts = [
        {**KILL, "rows": [1, 2, 3], "saves": [2]},
        fault("worker-died", rows=[3, 4, 5], saves=[4]),
        fault(rows=[5]),
        fault("trainer-phase-failed"),
        DONE,
    ]
    code, starts, rows = run(*acts)
    assert code == 0 and starts == [["first"], *[["again"]] * 4]
    assert [(row["restart"], row["resumed_from"], row["step"]) for row in rows] == [
        (1, 2, 4), (2, 4, 6), (3, 4, 6), (4, 4, 5),
    ]  # fmt: skip
    assert [(row["exit_code"], row["code"]) for row in rows] == [
        (-9, "killed"), (1, "worker-died"), (1, "unexpected"), (1, "trainer-phase-failed"),
    ]  # fmt: skip
    assert rows[0]["sentence"].startswith("the process of the run was ended by SIGKILL; most often the kernel")
    assert [row["wait_s"] for row in rows] == [0.001, 0.001, 0.002, 0.004]


@pytest.mark.parametrize("code", [0, 2, 130, 141])
def test_a_run_that_is_done_rejected_or_interrupted_is_not_started_again(run: Run, code: int) -> None:
    assert run({"code": code}, DONE) == (code, [["first"]], [])


def test_a_run_that_a_rule_ended_is_not_started_again(run: Run) -> None:
    """It has saved a checkpoint, from which the next start would train one more step, and so on."""
    ended: list[str] = []
    assert run(fault("health-stop", rows=[1], saves=[1]), DONE, on_end=ended.append) == (1, [["first"]], [])
    assert len(ended) == 1 and "because of health-stop" in ended[0]


def test_a_step_that_fails_twice_without_a_machine_ends_the_run(
    run: Run, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In between, the step may have failed because of a machine. The same step dies of machines any number of times."""
    poisoned = [fault("no-loss-tokens", rows=[1, 2], saves=[1]), {**KILL, "rows": [2], "saves": [1]}, fault(rows=[2])]
    ended: list[str] = []
    code, starts, rows = run(*poisoned, DONE, on_end=ended.append)
    assert (code, len(starts), len(rows)) == (1, 3, 2)
    (sentence,) = ended
    assert "step 3 failed twice" in sentence and "because of no-loss-tokens" in sentence
    assert "because of unexpected" in sentence
    assert capfd.readouterr().err.splitlines()[-1] == f"slime-like: {sentence}"
    again = [{**fault("ray-died"), "rows": [2], "saves": [1]}] * 5
    assert run(*again, DONE)[0] == 0
    passes = {**KILL, "rows": [2, 3], "saves": [1]}
    assert run(fault(rows=[1, 2], saves=[1]), passes, fault(rows=[2], saves=[1]), DONE)[0] == 0


def test_three_starts_without_a_new_checkpoint_end_the_run(run: Run) -> None:
    """A checkpoint saved again counts as new. Starts without one must be in a row."""
    code, starts, _ = run(KILL, {**KILL, "saves": [3]}, KILL, {**KILL, "saves": [3]}, KILL, KILL, KILL, DONE)
    assert (code, len(starts)) == (1, 7)


def test_the_limit_counts_restarts(run: Run) -> None:
    acts = [{**KILL, "saves": [step]} for step in range(1, 9)]
    code, starts, rows = run(*acts, limit=2)
    assert (code, len(starts), len(rows)) == (1, 3, 2)


@pytest.mark.parametrize("resume", ["never", "/elsewhere/checkpoints/step-000009"])
def test_a_restart_resumes_from_a_checkpoint_of_this_run_only(run: Run, tmp_path: Path, resume: str) -> None:
    """There is a later checkpoint of an earlier run, which is not this run's."""
    (tmp_path / "run" / "checkpoints" / "step-000009").mkdir(parents=True)
    _, starts, rows = run(KILL, {**KILL, "saves": [1]}, KILL, DONE, resume=resume)
    assert starts == [["first"], ["again"], *[["again", "--resume", "auto"]] * 2]
    assert [row["resumed_from"] for row in rows] == [0, 1, 1]


def test_a_verdict_that_nothing_is_restarted_ends_every_node(run: Run) -> None:
    code, starts, rows = run(fault(ENDED), DONE, rank=1)
    assert (code, len(starts), rows) == (1, 1, [])


def test_a_directory_that_is_moved_aside_does_not_take_the_record_with_it(run: Run, tmp_path: Path) -> None:
    """A start without a checkpoint begins in a new directory."""
    _, _, rows = run(KILL, {**KILL, "moves": True}, {**DONE, "moves": True})
    assert [row["restart"] for row in rows] == [1, 2]
    assert len((tmp_path / "run.1" / RESTARTS_FILE).read_text().splitlines()) == 1


PARENT = """
import sys
from pathlib import Path
from slime_like.launch import restarts
from slime_like.system.interrupts import InterruptHandler
InterruptHandler().install()
restarts._STOP_S = 0.5
child = [sys.executable, "-S", "-c", sys.argv[2]]
try:
    restarts.Restarts(Path(sys.argv[1]), [], "auto", -1, command=lambda _: child).run()
except KeyboardInterrupt:
    sys.exit(130)
"""
POLITE = """
import time
from pathlib import Path
try:
    print("up", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print("asked to end", flush=True)
    raise SystemExit(130)
"""
STUBBORN = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


def _with_terminal() -> None:
    """Undo what ``nohup`` does, in case the tests were started by it."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("child", [POLITE, STUBBORN], ids=["polite", "stubborn"])
def test_a_signal_to_the_parent_ends_the_child_within_a_bound(tmp_path: Path, number: int, child: str) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path / "run"), child]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=_with_terminal) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == "up\n"
        (process,) = psutil.Process(parent.pid).children()
        parent.send_signal(number)
        began = time.monotonic()
        assert parent.wait(10) == 130
        assert time.monotonic() - began < 5
        assert parent.stdout.read() == ("asked to end\n" if child == POLITE else "")
    assert not process.is_running()
    assert not (tmp_path / "run" / RESTARTS_FILE).exists()


def test_a_killed_parent_takes_its_child_with_it(tmp_path: Path) -> None:
    """The child is the real command, which waits for its configuration."""
    os.mkfifo(tmp_path / "config.yaml")
    program = f"""
from pathlib import Path
from slime_like.launch.restarts import Restarts
Restarts(Path({str(tmp_path / "run")!r}), ["train", {str(tmp_path / "config.yaml")!r}], "auto", -1).run()
"""
    parent = subprocess.Popen([sys.executable, "-c", program])
    writer = os.open(tmp_path / "config.yaml", os.O_WRONLY)  # returns when the child has begun to read
    try:
        (child,) = psutil.Process(parent.pid).children()
        parent.kill()
        parent.wait()
        wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)
    finally:
        os.close(writer)


HUNG_UP = """
import fcntl, sys, termios, time
from pathlib import Path
from slime_like.system.interrupts import InterruptHandler
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
InterruptHandler().install()
try:
    Path(sys.argv[1]).touch()
    time.sleep(60)
except KeyboardInterrupt:
    print("cleaning up", flush=True)
    print("cleaning up", file=sys.stderr, flush=True)
    Path(sys.argv[1]).write_text("clean")
    sys.exit(130)
"""


def test_a_terminal_that_goes_away_interrupts_like_ctrl_c(tmp_path: Path) -> None:
    """Output that nobody can read any more does not keep the run from cleaning up."""
    master, slave = pty.openpty()
    command = [sys.executable, "-c", HUNG_UP, str(tmp_path / "file")]
    outputs = {"stdin": slave, "stdout": slave, "stderr": slave}
    process = subprocess.Popen(command, **outputs, start_new_session=True, preexec_fn=_with_terminal)
    os.close(slave)
    wait_until((tmp_path / "file").exists)
    os.close(master)
    assert process.wait(10) == 130
    assert (tmp_path / "file").read_text() == "clean"


@pytest.mark.parametrize(
    ("error", "code"),
    [(TrainerError("it died", code="worker-died", who="trainer rank 3", phase="scoring"), 1), (ConfigError("no"), 2)],
)
def test_the_cause_of_a_failure_is_left_for_the_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, code: int
) -> None:
    """A rejected run is not restarted and leaves none."""
    path = tmp_path / "run" / CAUSE_FILE
    monkeypatch.setattr("slime_like.commands.main._imported", lambda: Mock(side_effect=error))
    monkeypatch.setenv("SLIME_LIKE_CAUSE_FILE", str(path))
    assert main([]) == code
    found = json.loads(path.read_text()) if path.exists() else None
    sentence = {"code": "worker-died", "sentence": "trainer rank 3, scoring: it died"}
    assert found == (None if code == 2 else {**sentence, "who": "trainer rank 3", "phase": "scoring"})
