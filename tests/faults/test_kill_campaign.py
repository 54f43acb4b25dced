"""Processes of every class are killed and stopped in every phase of one run, which is started again after each end.

    KILLS=120 STOPS=20 KILLS_DIR=runs/kills python -m pytest -s -m acceptance tests/faults/test_kill_campaign.py

``KILLS`` and ``STOPS`` are numbers of cases, dealt evenly to classes and phases in the order of ``KILLS_SEED``. Each is
appended to ``KILLS_DIR/ENGINE/cases.jsonl``; the same command continues after those that are there. With
``KILLS_RESTARTS=1``, the run is started once with ``--restarts -1``, and comes back by itself after each end. Then no
process is killed during a start.
"""

import json
import os
import random
import re
import shutil
import signal
import tempfile
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from slime_like.data.dump import dump_path, load_trajectories
from slime_like.data.ledger import audit_run
from slime_like.examples.tiny_model import make_calculator_data, make_tiny_model
from slime_like.observability.metrics import RESTARTS_FILE, read_metrics
from slime_like.observability.names import LOSS
from tests.faults.quick import running
from tests.support.processes import Command

SEED = int(os.environ.get("KILLS_SEED", 0))
NOTICED_S = {"SIGKILL": 30.0, "SIGSTOP": 120.0}
"""Bounds on the time from the signal until the message."""
GIVE_UP_S, DRIVER_RESTS_S, START_S, END_S, LOOK_EVERY_S = 160.0, 45.0, 240.0, 60.0, 0.05
STEPS_AFTER, FIRST_STEP = 3, "| step time "
RESTARTS = os.environ.get("KILLS_RESTARTS") == "1"
RESTART = re.compile(r"^slime-like: restart \d+ in .*$", re.MULTILINE)
NAMES = ("loss", "policy_loss", "kl_loss", "ratios", "entropy", "grad_norm", "num_tokens")
FIGURES = [f"train_actor_training/{name}" for name in NAMES]
CALLS = {
    "start": "",
    "generate": r"ray::EngineActor\.generate",
    "score": r"ray::TrainerRank\.(score|score_batch)",
    "train": r"ray::TrainerRank\.(load_batch|train_minibatch|train_window|finish_stream)",
    "sync": r"ray::(TrainerRank\.(begin_export|next_bucket|end_export)|EngineActor\.(update|load_bucket).*)",
    "save": r"ray::TrainerRank\.(save|start_save|is_written|finish)",
}
"""Maps each phase to the calls that workers run in it."""


class Victim(NamedTuple):
    """A class of processes: a pattern of the command line with ">" and the log's name, and one of the message about it.

    A run that continues while a needed process is stopped has not noticed it yet. A run ends if a vital one does.
    """

    found: str
    named: str
    needed: bool = True
    vital: bool = False


VICTIMS = {
    "driver": Victim("run_child", r"driver \(process", vital=True),
    "trainer rank": Victim(">trainer-", r"trainer(-0| rank 0)", vital=True),
    "reference worker": Victim(">reference-", r"reference(-| worker )0"),
    "engine actor": Victim("ray::EngineActor", r"engine(-| )0"),
    "engine core": Victim("VLLM::EngineCore|multiprocessing.spawn", r"engine(-| )0"),  # renamed if the system lets it
    "reward worker": Victim("slime_like.sandbox.rewards.worker", r"reward worker"),
    "environment worker": Victim("slime_like.sandbox.environment_worker", r"environment worker"),
    "raylet": Victim("raylet/raylet", r"raylet", vital=True),
    "GCS": Victim("gcs/gcs_server", r"(?i)gcs", vital=True),
    "runtime-env agent": Victim("ray::RuntimeEnvAgent", r"runtime_env_agent", vital=True),
    "dashboard agent": Victim("ray::DashboardAgent", r"dashboard_agent", needed=False, vital=True),
    "orphan reaper": Victim("cluster.orphan_reaper", r"orphan reaper", needed=False),
}


@dataclass
class Case:
    """A signal, and its outcome: "ended" with ``code``, "goes on", or "hung".

    ``step`` is the last step before the signal, ``seconds`` the time from the signal until the ``sentence`` about it.
    With restarts, ``back`` says whether the ended run has trained further steps by itself.
    """

    number: int
    victim: str
    how: str
    phase: str
    step: int = 0
    outcome: str = ""
    seconds: float = 0.0
    code: int | None = None
    sentence: str = ""
    faults: list[str] = field(default_factory=list)
    back: bool | None = None


def draw(victims: list[str], counts: dict[str, int], seed: int) -> list[Case]:
    """Return the cases of each signal in random order. Those of a victim pass through all phases."""
    generator, chosen = random.Random(seed), []
    for how, count in counts.items():
        calls = [phase for phase in CALLS if phase != "start" or not RESTARTS]
        some, phases = (generator.sample(all_, len(all_)) for all_ in (victims, calls))
        turns = (divmod(index, len(some)) for index in range(count))
        chosen += [(some[place], how, phases[(place + turn) % len(phases)]) for turn, place in turns]
    return [Case(number, *case) for number, case in enumerate(generator.sample(chosen, len(chosen)))]


class Campaign:
    """Runs in one directory, whose temporary files are in ``temporary``, with no others."""

    def __init__(self, root: Path, arguments: list[str], temporary: Path) -> None:
        self.root, self.arguments, self.temporary, self.generator = root, arguments, temporary, random.Random(SEED)
        self.command: Command | None = None
        self.before: set[Path] = set()
        self.heard = 0  # length of the output when the newest start began

    def run(self, cases: list[Case]) -> list[Case]:
        """Return the recorded cases and all others, which are tried now; then train the steps after the last one."""
        record = self.root / "cases.jsonl"
        done = [Case(**json.loads(line)) for line in record.read_text().splitlines()] if record.is_file() else []
        left = [case for case in cases if case.number not in {each.number for each in done}]
        while left:
            # Cases of the start come when a run has to be started anyway.
            case = next((case for case in left if (case.phase == "start") == (self.command is None)), left[0])
            left.remove(case)
            self.try_case(case)
            done.append(case)
            with record.open("a") as file:
                file.write(json.dumps(asdict(case)) + "\n")
            print(f"{len(done)}/{len(cases)} {case}", flush=True)
        command, goal, deadline = self.started(), self.steps() + STEPS_AFTER, time.monotonic() + START_S
        while self.steps() < goal:
            assert time.monotonic() < deadline and command.process.poll() is None, command.output
            time.sleep(LOOK_EVERY_S)
        self.interrupt(last := Case(-1, "", "", ""))
        assert not last.faults
        return done

    def steps(self) -> int:
        """Return the last trained step."""
        return max(trained(self.root), default=0)

    def started(self) -> Command:
        if self.command is None:
            self.before = set(self.temporary.iterdir())
            log = self.root / f"log-{len(list(self.root.glob('log-*')))}"
            self.command, self.heard = Command(self.arguments, log, forked=False), 0
        return self.command

    def try_case(self, case: Case) -> None:
        if case.phase == "start" and self.command is not None:
            self.interrupt(case)
        command = self.started()
        if case.phase == "start":
            self.find("orphan reaper")  # before there is one, a killed driver can leave nothing
            process = self.find(case.victim)
            time.sleep(self.generator.uniform(0.0, 3.0))
        else:
            command.wait_for(FIRST_STEP, START_S, command.output[: self.heard].count(FIRST_STEP) + 1)
            process = self.find(case.victim)
            running(command, CALLS[case.phase], timeout_s=60.0)
        case.step, heard = self.steps(), len(command.output)
        process.send_signal(signal.Signals[case.how])
        self.follow(case, process, heard)

    def find(self, name: str) -> psutil.Process:
        """Wait for a process of the class, and return the first."""
        command, deadline = self.started(), time.monotonic() + START_S
        while name != "driver" or RESTARTS:
            assert time.monotonic() < deadline and command.process.poll() is None, command.output
            for process in sorted(command.descendants(), key=lambda each: each.pid):
                with suppress(psutil.Error, OSError):
                    log = Path(f"/proc/{process.pid}/fd/1").readlink().name
                    if re.search(VICTIMS[name].found, f"{' '.join(process.cmdline())}>{log}"):
                        return process
            time.sleep(LOOK_EVERY_S)
        return psutil.Process(command.process.pid)

    def follow(self, case: Case, process: psutil.Process, heard: int) -> None:
        """Wait until the run has ended or has trained ``STEPS_AFTER`` further steps."""
        command, victim, began, goal = self.started(), VICTIMS[case.victim], time.monotonic(), 0
        is_driver, stops = case.victim == "driver", case.how == "SIGSTOP"
        while command.process.poll() is None:
            after, lives = time.monotonic() - began, is_running(process)
            lines = [line for line in command.output[heard:].splitlines() if re.search(victim.named, line)]
            if lines and not case.sentence:
                case.sentence, case.seconds = lines[0], after
            if is_driver and stops and after > DRIVER_RESTS_S:
                process.send_signal(signal.SIGCONT)
            if restarted := RESTART.search(command.output, heard):
                return self.come_back(case, restarted[0], after, heard)
            unnoticed = stops and lives and victim.needed and not is_driver and after < NOTICED_S[case.how] + 10
            if not goal and not unnoticed and (lives or not victim.vital):
                goal = self.steps() + STEPS_AFTER
            if goal and self.steps() >= goal and FIRST_STEP in command.output:
                case.outcome, case.seconds = "goes on", case.seconds or after
                if case.victim == "orphan reaper" or (lives and not is_driver):
                    self.interrupt(case)  # the end must not need the process, either
                return
            if after > GIVE_UP_S:
                case.outcome, case.seconds, case.faults = "hung", after, ["neither ended nor went on"]
                break
            time.sleep(LOOK_EVERY_S)
        finished = command.finish(0.0 if case.outcome else END_S)
        if not case.outcome:
            said = [line for line in command.output[heard:].splitlines() if line.startswith("slime-like:")]
            said = [line for line in said if "restart with --resume" not in line]
            # The orphan reaper writes about a killed driver after everything else has ended.
            case.seconds = (time.monotonic() if is_driver else finished.at) - began
            case.outcome, case.code, case.sentence = "ended", finished.code, (said or [""])[-1]
            case.faults += ["noticed too late"] * (case.seconds > NOTICED_S[case.how])
            case.faults += ["another process is named"] * (not re.search(victim.named, case.sentence))
        self.close(case, finished.left_behind)
        if (self.root / "run" / "ledger.sqlite").is_file():
            case.faults += map(str, audit_run(self.root / "run").problems)

    def come_back(self, case: Case, sentence: str, seconds: float, heard: int) -> None:
        """Wait until the run that has ended has trained ``STEPS_AFTER`` further steps."""
        command, goal, deadline = self.started(), self.steps() + STEPS_AFTER, time.monotonic() + START_S
        row = json.loads((self.root / "run" / RESTARTS_FILE).read_text().splitlines()[-1])
        case.outcome, case.seconds, case.code, case.sentence = "ended", seconds, row["exit_code"], sentence
        case.faults += ["noticed too late"] * (seconds > NOTICED_S[case.how])
        self.heard = len(command.output)
        while self.steps() < goal and time.monotonic() < deadline and command.process.poll() is None:
            time.sleep(LOOK_EVERY_S)
        case.back = self.steps() >= goal
        case.faults += ["did not come back"] * (not case.back)
        case.faults += ["another process is named"] * (
            not re.search(VICTIMS[case.victim].named, command.output[heard:])
        )
        case.faults += map(str, audit_run(self.root / "run").problems)

    def interrupt(self, case: Case) -> None:
        """End the run as Ctrl-C does."""
        command, began = self.started(), time.monotonic()
        command.interrupt()
        finished = command.finish(END_S)
        if finished.code != 130 or finished.at - began > NOTICED_S["SIGKILL"]:
            case.faults.append(f"Ctrl-C: code {finished.code} after {finished.at - began:.0f} s")
        self.close(case, finished.left_behind)

    def close(self, case: Case, left: list[str]) -> None:
        case.faults += [f"left behind: {what}" for what in [*left, *(set(self.temporary.iterdir()) - self.before)]]
        self.command = None


def is_running(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def flags(root: Path, model: Path, engine: str, steps: int) -> list[str]:
    """Conversations, three rewards and a reference worker need a process of every class.

    The transformers engine takes one request at a time: the last digits of a product depend on the requests in a batch.
    """
    rewards = "[{name: math_verify}, {name: environment}, {name: format, options: {pattern: '.*[a-m].*'}}]"
    settings = {
        "run_dir": root / "run", "model.path": model, "data.train": model / "data" / "train.jsonl", "steps": steps,
        "evaluation.files": [], "evaluation.every": 0, "rollout.engine": engine, "rollout.prompts_per_step": 16,
        "rollout.samples_per_prompt": 4, "rollout.engine_args": "{transformers: {max_batch_size: 1}}",
        "reward.functions": rewards, "algorithm.kl.coef": 0.01, "reference.placement": "workers",
        "trainer.optimizer.warmup_steps": 0, "trainer.optimizer.decay": "constant", "trainer.cpu_threads": 1,
        "checkpoint.every": 3, "checkpoint.export_hf": "false", "debug.save_rollouts": root / "rollouts",
        "logging.progress": "plain", "logging.tensorboard": "false",
    }  # fmt: skip
    restarts = ["--restarts", "-1"] if RESTARTS else []
    return [
        "train",
        "configs/calculator.yaml",
        *restarts,
        *(part for k, v in settings.items() for part in (f"--{k}", str(v))),
    ]


def trained(root: Path) -> dict[int, dict[str, float]]:
    """Return the run's metrics of every step."""
    metrics = root / "run" / "metrics.jsonl"
    return {row["step"]: row for row in read_metrics(metrics) if LOSS in row} if metrics.is_file() else {}


@pytest.mark.acceptance
@pytest.mark.timeout(0)
@pytest.mark.parametrize("engine", ["transformers", "vllm"])
def test_a_run_survives_a_campaign_of_kills(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    """Each signal is noticed in time and named, nothing is left, and the run ends like an undisturbed one."""
    victims = ["engine core"] if engine == "vllm" else [name for name in VICTIMS if name != "engine core"]
    share = len(VICTIMS) if engine == "vllm" else 1
    counts = {"SIGKILL": int(os.environ.get("KILLS", 12)), "SIGSTOP": int(os.environ.get("STOPS", 4))}
    cases = draw(victims, {how: -(-count // share) for how, count in counts.items()}, SEED)
    root = Path(os.environ.get("KILLS_DIR", tmp_path)).absolute() / engine
    model, whole = root / "model", root / "undisturbed"
    make_tiny_model(model, family="qwen3", seed=0)
    make_calculator_data(model / "data")
    temporary = Path(tempfile.gettempdir(), f"k{os.getpid():x}")  # paths of vLLM's sockets must be short
    temporary.mkdir()
    try:
        monkeypatch.setenv("TMPDIR", str(temporary))
        monkeypatch.setattr(tempfile, "tempdir", str(temporary))
        campaign = Campaign(root, flags(root, model, engine, 100_000), temporary)
        done, steps = campaign.run(cases), campaign.steps()
    finally:
        monkeypatch.undo()
        shutil.rmtree(temporary)
    shutil.rmtree(whole, ignore_errors=True)
    with Command(flags(whole, model, engine, steps), whole / "log", forked=False) as command:
        command.succeed(START_S + 10.0 * steps)
    assert not [case for case in done if case.faults]
    figures, expected = ([row[name] for row in trained(each).values() for name in FIGURES] for each in (root, whole))
    assert figures == pytest.approx(expected, rel=0, abs=1e-6)
    for step in range(1, steps + 1):
        ours, theirs = (load_trajectories(dump_path(each / "rollouts", step)) for each in (root, whole))
        assert [one.response_tokens.tolist() for one in ours] == [one.response_tokens.tolist() for one in theirs], step
