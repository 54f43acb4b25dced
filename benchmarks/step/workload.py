"""The workload of both systems, and our side: ``slime-like train``."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median

from benchmarks.report import flags, run_to_its_end, steady_steps
from slime_like.observability.names import STEP_TIME, phase_seconds
from slime_like.observability.timing import PHASES

NUM_PROMPTS = 32
SAMPLES_PER_PROMPT = 8
PARTS = (*(phase for phase in PHASES if phase != "wait"), "orchestration")
"""The phases of one of our steps; nothing waits for data in this benchmark."""

# An untrained model never answers a sum, so math-verify would give all samples the same reward, and updates would
# compute only zeros. Responses differ in length.
REWARD = "length"
REWARD_OPTIONS = {"limit": 0, "buffer": 1024}


@dataclass(frozen=True, slots=True)
class Measurement:
    """Steady steps of one system under one workload.

    Attributes:
        step_s: median seconds per step.
        response_length: mean tokens per response, over all measured steps.
        parts: median seconds of every phase; empty if the system does not report phases.
    """

    step_s: float
    response_length: float
    parts: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Workload:
    """One setting of the comparison.

    Attributes:
        model: Hugging Face checkpoint.
        prompts: JSONL file with ``prompt`` and ``answer``, read in its order.
        max_new_tokens: length limit of a response.
        steps: training steps, one optimizer update each.
        warmup_steps: number of first steps that are not timed.
        learning_rate: constant, and so small that response lengths do not drift.
        prompts_per_step, samples_per_prompt: their product is the number of sequences per step.
        seed: for sampling.
        engine: our inference engine.
        processes: our engines and, in turn, our data-parallel trainer ranks. The other system uses threads.
        device: cuda (bfloat16, with main weights in float32) or cpu (float32).
    """

    model: Path
    prompts: Path
    max_new_tokens: int
    steps: int
    warmup_steps: int
    learning_rate: float = 1e-6
    prompts_per_step: int = NUM_PROMPTS
    samples_per_prompt: int = SAMPLES_PER_PROMPT
    seed: int = 0
    engine: str = "transformers"
    processes: int = 1
    device: str = "cpu"

    def write(self, path: Path) -> None:
        """Write the workload as JSON for the other system's process."""
        path.write_text(json.dumps(asdict(self), default=str), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Workload:
        """Read a file that ``write`` wrote."""
        fields = json.loads(path.read_text(encoding="utf-8"))
        return cls(**{**fields, "model": Path(fields["model"]), "prompts": Path(fields["prompts"])})


def make_inputs(directory: Path, shape: str) -> tuple[Path, Path]:
    """Make an untrained model, which rarely ends a response by itself, and sums as prompts; return both paths."""
    from benchmarks.trainer.shapes import write_checkpoint
    from slime_like.examples.tiny_model import make_arithmetic_data

    write_checkpoint(shape, directory, "float32")
    make_arithmetic_data(directory / "data")
    return directory, directory / "data" / "train.jsonl"


def measure_ours(workload: Workload, directory: Path) -> Measurement:
    """Train in a separate process, in ``directory``. Everything that is not set here is the default."""
    run_dir = directory / "ours"
    settings = {
        "run_dir": run_dir,
        "resume": "never",
        "steps": workload.steps,
        "seed": workload.seed,
        "model.path": workload.model,
        "model.dtype": "bfloat16" if workload.device == "cuda" else "float32",
        "data.train": workload.prompts,
        "data.apply_chat_template": "false",
        "data.shuffle": "false",
        "data.max_prompt_tokens": 16,
        "rollout.engine": workload.engine,
        "rollout.num_engines": workload.processes,
        "rollout.prompts_per_step": workload.prompts_per_step,
        "rollout.samples_per_prompt": workload.samples_per_prompt,
        "rollout.max_new_tokens": workload.max_new_tokens,
        "reward.functions": json.dumps([{"name": REWARD, "options": REWARD_OPTIONS}]),
        "trainer.parallel.data": workload.processes,
        "trainer.optimizer.lr": workload.learning_rate,
        "logging.tensorboard": "false",
        "logging.progress": "off",
        "cluster.placement": "colocated" if workload.device == "cuda" else "separate",
        "checkpoint.export_hf": "false",
    }
    command = [sys.executable, "-m", "slime_like.commands.main", "train", *flags(settings)]
    run_to_its_end(command, directory / "ours.log")
    steps = steady_steps(run_dir, workload.warmup_steps)
    return Measurement(
        step_s=median(step[STEP_TIME] for step in steps),
        response_length=fmean(step["rollout/response_length_mean"] for step in steps),
        parts={part: median(step[phase_seconds(part)] for step in steps) for part in PARTS},
    )
