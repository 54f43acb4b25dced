"""Measure the overhead of 64 concurrent agents: ``python -m benchmarks.agents``.

The calculator agent calls the endpoint with OpenAI's client: tiny model, transformers engine, 64 rollouts per step, one
process per agent. The processor time of every process of the run is counted over its steady steps. The endpoint's part
of the engine's actor (HTTP, sessions, templates, agents' pipes) is measured in this process with the same agents and
engine: the endpoint has the event loop's thread to itself, and the engine computes in others. Orchestration is the
endpoint, the driver, Ray and rewards, as a share of all processor time. The report also shows the phase
"orchestration", which is wall time between phases.
"""

import asyncio
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import psutil

from benchmarks.report import flags, heading, met, parser, publish, run_to_its_end, steady_steps, table
from rollout.transformers.engine import TransformersEngine
from slime_like.config import RunConfig
from slime_like.config.reading.load import load_config
from slime_like.data.prompts import PromptSource
from slime_like.interfaces import ConversationTask, GenerationRequest, SamplingParams
from slime_like.models.tokenization import load_tokenizer
from slime_like.observability.metrics import METRICS_FILE, read_metrics
from slime_like.observability.names import STEP_TIME, phase_seconds
from slime_like.orchestration.rollout.agents import AgentRollouts

GOAL = 15.0
RECIPE = Path("configs/calculator_agent.yaml")
_GROUPS, _SAMPLES = 8, 8
_WARM_UP, _STEPS, _TIMEOUT_S, _LOOK_EVERY_S = 5, 25, 900.0, 0.2
_ROLES = {"agents": "slime_like.sandbox.agent_worker", "actor": "ray::EngineActor", "trainer": "ray::TrainerRank"}
_COMMAND = [sys.executable, "-m", "slime_like.commands.main"]


@dataclass(frozen=True, slots=True)
class Run:
    """Means over the steady steps.

    Attributes:
        seconds: processor seconds by role.
        step_s: wall seconds.
        turns: turns per rollout.
        phase: share of the phase "orchestration", percent.
    """

    seconds: dict[str, float]
    step_s: float
    turns: float
    phase: float


def measure_run(run_dir: Path, arguments: list[str]) -> Run:
    """Train and measure."""
    log = run_dir.with_suffix(".log")
    with log.open("wb") as file:
        command = [*_COMMAND, "train", str(RECIPE), *arguments, "--run_dir", str(run_dir)]
        process = subprocess.Popen(command, stdout=file, stderr=file)
        try:
            first, last = (_at_step(process, run_dir, step) for step in (_WARM_UP, _WARM_UP + _STEPS))
        finally:
            process.terminate()
            process.wait(120)
    seconds = dict.fromkeys((*_ROLES, "others"), 0.0)
    for pid, (role, used) in last.items():
        seconds[role] += (used - first.get(pid, (role, 0.0))[1]) / _STEPS
    steps = steady_steps(run_dir, _WARM_UP)
    step_s = fmean(step[STEP_TIME] for step in steps)
    turns = fmean(step["rollout/turns_mean"] for step in steps)
    return Run(seconds, step_s, turns, 100 * fmean(step[phase_seconds("orchestration")] for step in steps) / step_s)


def _at_step(process: "subprocess.Popen[bytes]", run_dir: Path, step: int) -> dict[int, tuple[str, float]]:
    """Return role and processor seconds of every process of the run once it has trained this step."""
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


def endpoint_s(config: RunConfig, waves: int) -> float:
    """Return the event loop's processor seconds per call, over ``waves`` of 64 rollouts after two warm-up waves."""

    async def run() -> float:
        tokenizer, engine = load_tokenizer(config.model.path), TransformersEngine(config, 0)
        prompts = PromptSource((), tokenizer, config.data, 0, keep_messages=True)
        await engine.start()

        async def version() -> int:
            return 0

        agents = AgentRollouts(config, tokenizer, engine.generate, version)
        await agents.start()
        calls, began = 0, 0.0
        for number in range(waves + 2):
            if number == 2:
                calls, began = 0, time.thread_time()
            requests = [
                GenerationRequest(
                    f"{number}-{index}",
                    prompt.input,
                    SamplingParams(max_new_tokens=config.rollout.max_new_tokens),
                    num_samples=_SAMPLES,
                    seed=prompt.group_id,
                    task=ConversationTask(prompt.answer, {}, tuple(prompt.messages or ())),
                )
                for index, prompt in enumerate(prompts.next(_GROUPS))
            ]
            for group in await asyncio.gather(*map(agents.run, requests)):
                calls += sum(len(one.conversation.turns) for one in group if one.conversation is not None)
        used = time.thread_time() - began
        await agents.close()
        await engine.stop()
        return used / calls

    return asyncio.run(run())


def report(run: Run, call_s: float) -> tuple[str, bool]:
    """Return the result as Markdown, and whether the goal is met."""
    calls, total = _GROUPS * _SAMPLES * run.turns, sum(run.seconds.values())
    endpoint = calls * call_s
    share = 100 * (endpoint + run.seconds["others"]) / total
    parts = {
        "agents' own processes": run.seconds["agents"],
        "engine": run.seconds["actor"] - endpoint,
        "trainer": run.seconds["trainer"],
        f"endpoint: {calls:.0f} calls of {1000 * call_s:.2f} ms": endpoint,
        "driver, Ray, rewards": run.seconds["others"],
    }
    rows = [(what, f"{seconds:.3f}", f"{100 * seconds / total:.1f} %") for what, seconds in parts.items()]
    return (
        f"{table('processor seconds a step | | share', rows)}\n\n"
        f"Orchestration, the last two: {share:.1f} % (goal below {GOAL:.0f} %: {met(share < GOAL)}). Wall time of a "
        f"step {run.step_s:.2f} s; the phase orchestration has {run.phase:.1f} % of it."
    ), share < GOAL


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--directory", type=Path, default=Path("runs/benchmark_agents"), help="new directory")
    options = arguments.parse_args()
    directory: Path = options.directory.absolute()
    directory.mkdir(parents=True)
    head, tiny, warm = heading(), directory / "tiny", directory / "warm_start"
    rows = tiny / "data" / "calculator"
    run_to_its_end([*_COMMAND, "make-tiny-model", str(tiny)], directory / "tiny.log")
    given = flags({"model.path": tiny, "data.train": rows / "sft.jsonl", "run_dir": warm})
    run_to_its_end([*_COMMAND, "train", "configs/calculator_warm_start.yaml", *given], directory / "warm_start.log")
    given = flags(
        {
            "model.path": warm / "hf",
            "data.train": rows / "train.jsonl",
            "evaluation.files": [],
            "steps": _WARM_UP + _STEPS + 5,
            "rollout.prompts_per_step": _GROUPS,
            "rollout.samples_per_prompt": _SAMPLES,
            "rollout.agent.workers": _GROUPS * _SAMPLES,
            "rollout.agent.start_timeout_s": 300,
            "checkpoint.export_hf": "false",
            "logging.tensorboard": "false",
        }
    )
    run = measure_run(directory / "run", given)
    text, is_met = report(run, endpoint_s(load_config(RECIPE, given, directory / "unused"), waves=10))
    publish(f"{head}\n\n{text}", options.result)
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
