"""What 64 agents at once cost beside engine, trainer and their own work: ``python -m benchmarks.agents``.

The calculator as an agent behind the endpoint, by OpenAI's client, against the calculator as an environment, which
samples the same tokens from the same seeds without HTTP: tiny model, transformers engine, 64 rollouts a step, each agent
in a process. Processor time of every process is counted over the steady steps. Orchestration is what is left without
the agents' processes, the trainer's, and what the environment's run takes in the engine's actor: HTTP, sessions,
templates, the driver, Ray. The phase "orchestration" of the run, which is wall time between phases, stands beside it.
"""

import argparse
import datetime
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import psutil

from benchmarks.orchestration import phase_report
from benchmarks.step.machine import describe_machine, load_average
from slime_like.observability.metrics import METRICS_FILE, read_metrics

GOAL = 15.0
_WARM_UP, _STEPS, _TIMEOUT_S, _LOOK_EVERY_S = 5, 25, 900.0, 0.2
_ROLES = {
    "agents": "slime_like.sandbox.agents",
    "engine's actor": "ray::EngineActor",
    "trainer": "ray::TrainerRank",
}


@dataclass(frozen=True, slots=True)
class Run:
    """Means over the steady steps: processor seconds by role, wall seconds, turns of a rollout, and the phase's share."""

    seconds: dict[str, float]
    step_s: float
    turns: float
    phase: float

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def measure(name: str, directory: Path, flags: list[str]) -> Run:
    """Train with ``configs/NAME.yaml``, and count while it does."""
    run_dir = directory / name
    command = [sys.executable, "-m", "slime_like.commands.main", "train", f"configs/{name}.yaml", *flags]
    with (directory / f"{name}.log").open("wb") as log:
        process = subprocess.Popen([*command, "--run_dir", str(run_dir)], stdout=log, stderr=log)
        try:
            first = _at_step(process, run_dir, _WARM_UP)
            last = _at_step(process, run_dir, _WARM_UP + _STEPS)
        finally:
            process.terminate()
            process.wait(120)
    counted = {pid: (role, seconds - first.get(pid, (role, 0.0))[1]) for pid, (role, seconds) in last.items()}
    roles = (*_ROLES, "others")
    seconds = {role: sum(s for r, s in counted.values() if r == role) / _STEPS for role in roles}
    steps = [r for r in read_metrics(run_dir / METRICS_FILE) if "rollout/turns_mean" in r][_WARM_UP:][:_STEPS]
    report = phase_report(run_dir / METRICS_FILE, _WARM_UP)
    turns = fmean(step["rollout/turns_mean"] for step in steps)
    return Run(seconds, report.step_s, turns, report.share("orchestration"))


def _at_step(process: "subprocess.Popen[bytes]", run_dir: Path, step: int) -> dict[int, tuple[str, float]]:
    """Role and processor seconds of every process of the run, when it has trained this step."""
    deadline = time.monotonic() + _TIMEOUT_S
    while not (run_dir / METRICS_FILE).is_file() or _trained(run_dir) < step:
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"{run_dir.name} did not reach step {step}: see {run_dir}.log")
        time.sleep(_LOOK_EVERY_S)
    found = {}
    for one in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
        try:
            command, times = " ".join(one.cmdline()), one.cpu_times()
        except psutil.NoSuchProcess:
            continue
        role = next((role for role, sign in _ROLES.items() if sign in command), "others")
        found[one.pid] = (role, times.user + times.system)
    return found


def _trained(run_dir: Path) -> int:
    return max((r["step"] for r in read_metrics(run_dir / METRICS_FILE) if "rollout/groups" in r), default=0)


def table(agent: Run, environment: Run) -> tuple[str, bool]:
    """The result as Markdown, and whether the goal is met."""
    endpoint = agent.seconds["engine's actor"] - environment.seconds["engine's actor"]
    orchestration = endpoint + agent.seconds["others"]
    share = 100 * orchestration / agent.total
    rows = [
        ("agents' own processes", agent.seconds["agents"]),
        ("engine (the actor in the environment's run)", environment.seconds["engine's actor"]),
        ("trainer", agent.seconds["trainer"]),
        ("endpoint (the rest of the actor)", endpoint),
        ("driver, Ray, rewards", agent.seconds["others"]),
    ]
    lines = ["| processor seconds a step | | share |", "|---|---:|---:|"]
    lines += [f"| {what} | {seconds:.3f} | {100 * seconds / agent.total:.1f} % |" for what, seconds in rows]
    calls, verdict = 64 * agent.turns, "met" if share < GOAL else "**not met**"
    lines += [
        "",
        f"Orchestration, the last two: {share:.1f} % (goal below {GOAL:.0f} %: {verdict}). {calls:.0f} calls a step, "
        f"{1000 * endpoint / calls:.1f} ms of the endpoint each. Wall time of a step {agent.step_s:.2f} s, of the "
        f"environment's {environment.step_s:.2f} s; the phase orchestration has {agent.phase:.1f} % of it.",
    ]
    return "\n".join(lines), share < GOAL


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.agents", description=__doc__)
    parser.add_argument("--directory", type=Path, default=Path("runs/benchmark_agents"), help="new directory")
    parser.add_argument("--result", type=Path, help="write the table here, too")
    options = parser.parse_args()
    directory: Path = options.directory.absolute()
    directory.mkdir(parents=True)
    started = load_average()
    data = directory / "data"
    subprocess.run(
        [sys.executable, "-m", "slime_like.commands.main", "make-tiny-model", str(data)], check=True, timeout=_TIMEOUT_S
    )
    flags = ["--model.path", str(data), "--data.train", str(data / "data" / "calculator" / "sft.jsonl")]
    warm = ["train", "configs/calculator_warm_start.yaml", *flags, "--run_dir", str(directory / "warm_start")]
    subprocess.run([sys.executable, "-m", "slime_like.commands.main", *warm], check=True, timeout=_TIMEOUT_S)
    flags = [
        "--model.path", str(directory / "warm_start" / "hf"),
        "--data.train", str(data / "data" / "calculator" / "train.jsonl"), "--evaluation.files", "[]",
        "--steps", str(_WARM_UP + _STEPS + 5), "--rollout.prompts_per_step", "8", "--rollout.samples_per_prompt", "8",
        "--checkpoint.export_hf", "false", "--logging.tensorboard", "false",
    ]  # fmt: skip
    environment = measure("calculator", directory, flags)
    workers = ["--rollout.agent.workers", "64", "--rollout.agent.start_timeout_s", "300"]
    agent = measure("calculator_agent", directory, [*flags, *workers])
    text, met = table(agent, environment)
    when = datetime.date.today().isoformat()
    machine = f"{when}, {describe_machine()}, load average {started:.1f} at the start"
    text = f"{machine}, `python -m benchmarks.agents`.\n\n{text}\n"
    print(text)
    if options.result is not None:
        options.result.write_text(text, encoding="utf-8")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
