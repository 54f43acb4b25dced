"""Compare sampling ahead with taking turns, streamed or not: ``python -m benchmarks.ahead [--result FILE]``.

A step has 128 responses from an untrained tiny model whose 264 tokens are about equally likely. Four of the tokens end
a response, so lengths are geometric: the mean is about 60, the limit 256, and the longest is four times the mean. The
engine's processes are always pinned to one core and the trainer's to another: taking turns leaves one core idle.
The bound is (g + t) / max(g, t), with g and t the seconds of sampling and training when they take turns. The trainer's
idle share is the time that it waits for samples. A step fills about nine micro-batches, so that most of them can be
streamed (``rollout.stream``).
"""

import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import psutil

from benchmarks.report import flags, heading, met, parser, publish, steady_steps, table
from slime_like.examples.tiny_model import make_arithmetic_data, make_tiny_model
from slime_like.observability.names import IDLE_TIME, STEP_TIME, phase_seconds
from tests.support.processes import Command

GOAL = 1.3
_WARM_UP, _TIMEOUT_S, _LOOK_EVERY_S = 5, 1800.0, 0.5
_STOP_IDS = "[20, 60, 100, 140]"


@dataclass(frozen=True)
class Manner:
    """How sampling and training are combined."""

    ahead: int
    streams: bool

    def __str__(self) -> str:
        return (f"ahead ({self.ahead})" if self.ahead else "in turn (0)") + (", streamed" if self.streams else "")

    @property
    def directory(self) -> str:
        return f"ahead-{self.ahead}" + ("-streamed" if self.streams else "")


@dataclass(frozen=True)
class Figures:
    """Means over the steady steps of one run: seconds, and ``length`` in tokens.

    Attributes:
        step: whole step.
        sampling: generate and reward, if they take turns with training.
        training: score, train and sync, if they take turns with sampling.
        idle: time in which the trainer has no samples.
        length: tokens per response.
        staleness: mean number of versions between sampling and training.
    """

    step: float
    sampling: float
    training: float
    idle: float
    length: float
    staleness: float

    @property
    def samples(self) -> tuple[str, str]:
        return f"{self.length:.0f}", f"{self.staleness:.2f}"


def measure(root: Path, model: Path, engine: str, manner: Manner, steps: int) -> Figures:
    """Run once, pinned, and read the steady steps."""
    settings = {
        "run_dir": root / manner.directory,
        "resume": "never",
        "steps": steps,
        "model.path": model,
        "model.dtype": "float32",
        "data.train": model / "data" / "train.jsonl",
        "data.apply_chat_template": "false",
        "data.max_prompt_tokens": 16,
        "rollout.engine": engine,
        "rollout.prompts_per_step": 16,
        "rollout.samples_per_prompt": 8,
        "rollout.max_new_tokens": 256,
        "rollout.stop_token_ids": _STOP_IDS,
        "rollout.max_staleness": manner.ahead,
        "rollout.stream": str(manner.streams).lower(),
        "algorithm.importance.correction": "truncate",
        "reward.functions": "[{name: length, options: {limit: 0, buffer: 1024}}]",
        "trainer.target_tokens_per_batch": 1024,
        "trainer.optimizer.lr": 1e-6,
        "trainer.cpu_threads": 1,
        "logging.tensorboard": "false",
        "logging.progress": "off",
    }
    log = root / f"log-{manner.directory}"
    with Command(["train", *flags(settings)], log, forked=False) as command:
        ended = threading.Event()
        pinning = threading.Thread(target=_keep_pinned, args=(command.descendants, ended), daemon=True)
        pinning.start()
        try:
            finished = command.finish(_TIMEOUT_S)
        finally:
            ended.set()
            pinning.join(10)
    if finished.code != 0:
        sys.exit(f"error: the run {manner} ended with {finished.code}: {finished.stderr[-500:]}")
    # A run that samples ahead has nothing left to sample in its last steps, so they are not steady.
    steady = steady_steps(root / manner.directory, _WARM_UP)[:-3]

    def mean(*names: str) -> float:
        return fmean(sum(float(record[name]) for name in names) for record in steady)

    return Figures(
        step=mean(STEP_TIME),
        sampling=mean(phase_seconds("generate"), phase_seconds("reward")),
        training=mean(phase_seconds("score"), phase_seconds("train"), phase_seconds("sync")),
        idle=mean(IDLE_TIME),
        length=mean("rollout/response_length_mean"),
        staleness=mean("rollout/staleness_mean"),
    )


def _keep_pinned(descendants: Callable[[], list[psutil.Process]], ended: threading.Event) -> None:
    """Pin engine and reward processes to one core and trainer ranks to the other; their children inherit it."""
    engine_core, trainer_core = sorted(os.sched_getaffinity(0))[:2]
    while not ended.wait(_LOOK_EVERY_S):
        for process in descendants():
            try:
                title = " ".join(process.cmdline())
                if "EngineActor" in title:
                    for member in (process, *process.children(recursive=True)):
                        member.cpu_affinity([engine_core])
                elif "TrainerRank" in title:
                    process.cpu_affinity([trainer_core])
            except psutil.NoSuchProcess:
                continue


def report(found: dict[Manner, Figures]) -> str:
    """Report ``found``, which starts with unstreamed turns; its last entry is compared with the goal."""
    turns, best = next(iter(found.values())), list(found)[-1]
    bound = (turns.sampling + turns.training) / max(turns.sampling, turns.training)
    ratio = turns.step / found[best].step
    rows = [
        (manner, f"{run.step:.3f}", f"{turns.step / run.step:.2f}", f"{run.idle / run.step:.0%}", *run.samples)
        for manner, run in found.items()
    ]
    columns = "max_staleness | step (s) | times as fast | trainer idle | response (tokens) | staleness"
    return (
        f"{table(columns, rows)}\n\n"
        f"{best}: {ratio:.2f} times as fast (goal {GOAL}: {met(ratio >= GOAL)}); sampling takes "
        f"{turns.sampling:.3f} s and training {turns.training:.3f} s in turn, so that overlap alone is bounded by "
        f"{bound:.2f}. What is beyond it comes from the engine, whose batch stays full over the ends of steps."
    )


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--engine", default="vllm")
    arguments.add_argument("--ahead", type=int, default=2, help="max_staleness to compare with 0")
    arguments.add_argument("--steps", type=int, default=25)
    arguments.add_argument("--out", type=Path, default=Path("runs/ahead"))
    options = arguments.parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit("error: two cores are needed, one for the engine and one for the trainer")
    os.environ["OMP_NUM_THREADS"] = "1"  # an engine would use all cores it starts on, and is pinned only later
    head, model = heading(), options.out / "model"
    make_tiny_model(model)
    make_arithmetic_data(model / "data")
    manners = [Manner(ahead, streams) for ahead in (0, options.ahead) for streams in (False, True)]
    found = {manner: measure(options.out, model, options.engine, manner, options.steps) for manner in manners}
    publish(f"{head}\n\n{report(found)}", options.result)


if __name__ == "__main__":
    main()
