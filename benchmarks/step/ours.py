"""Measure our side: ``slime-like train`` on the workload."""

import json
import sys
from pathlib import Path

from benchmarks.step.measurement import Measurement, from_run
from benchmarks.step.process import run_bounded
from benchmarks.step.workload import REWARD, REWARD_OPTIONS, Workload


def flags(workload: Workload, run_dir: Path) -> list[str]:
    """Return the workload as flags of ``slime-like train``; everything else is the default."""
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
    return [part for name, value in settings.items() for part in (f"--{name}", str(value))]


def measure(workload: Workload, directory: Path) -> Measurement:
    """Train in a separate process, in ``directory``."""
    run_dir = directory / "ours"
    command = [sys.executable, "-m", "slime_like.commands.main", "train", *flags(workload, run_dir)]
    run_bounded(command, directory / "ours.log")
    return from_run(run_dir, workload.warmup_steps)
