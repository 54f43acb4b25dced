"""Time a step with a model of real size on a CPU, by phase: ``python -m benchmarks.real_step [--result FILE]``.

The model has the shape of SmolLM2-135M (30 layers, 9 heads, 3 KV heads, 49,152 tokens) and random weights; nothing is
downloaded. A step samples 16 prompts 8 times, 64 tokens each, and makes one update. ``--against DIR`` alternates with
another checkout of this project, so that a drift of the machine's speed affects both. ``--flags`` gives both additional
settings, e.g. another model and its data; ``--flags-here`` gives only this one settings that the other does not have.
"""

import argparse
import datetime
import os
import shlex
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.step.machine import describe_machine, load_average
from slime_like.examples.tiny_model import make_arithmetic_data, make_tiny_model
from slime_like.observability.metrics import METRICS_FILE, read_metrics
from slime_like.observability.names import STEP_TIME, phase_seconds

_SHAPE: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
}
_PHASES = ("generate", "score", "train", "sync")
_TIMEOUT_S = 1800.0


def flags(run_dir: Path, model: Path, options: argparse.Namespace, dtype: str) -> list[str]:
    settings = {
        "run_dir": run_dir,
        "resume": "never",
        "steps": options.steps,
        "model.path": model,
        "model.dtype": dtype,
        "data.train": model / "data" / "train.jsonl",
        "data.apply_chat_template": "false",
        "data.max_prompt_tokens": 16,
        "rollout.engine": options.engine,
        "rollout.prompts_per_step": 16,
        "rollout.samples_per_prompt": 8,
        "rollout.max_new_tokens": options.new_tokens,
        "reward.functions": "[{name: length, options: {limit: 0, buffer: 1024}}]",
        "trainer.optimizer.lr": 1e-6,
        "checkpoint.every": 0,
        "logging.tensorboard": "false",
        "logging.progress": "off",
    }
    return ["train", *(part for name, value in settings.items() for part in (f"--{name}", str(value)))]


def measure(checkout: Path, run_dir: Path, model: Path, options: argparse.Namespace, dtype: str) -> dict[str, float]:
    """Return median seconds of all steps but the first, which touches memory for the first time."""
    more = options.flags + (options.flags_here if checkout == Path.cwd() else [])
    command = [str(Path(sys.executable).parent / "slime-like"), *flags(run_dir, model, options, dtype), *more]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run(
        command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        sys.exit(f"error: the run of {checkout} ended with {done.returncode}: {done.stderr[-500:]}")
    records = [record for record in read_metrics(run_dir / METRICS_FILE) if STEP_TIME in record][1:]
    names = {"step": STEP_TIME, **{phase: phase_seconds(phase) for phase in _PHASES}}
    return {column: median(float(record[name]) for record in records) for column, name in names.items()}


def report(found: dict[tuple[str, str], list[dict[str, float]]], load: float, arguments: str) -> str:
    columns = ("step", *_PHASES)
    rows = [
        f"| {dtype} | {side} | " + " | ".join(f"{median(run[column] for run in runs):.2f}" for column in columns) + " |"
        for (dtype, side), runs in found.items()
    ]
    ratios = []
    for (dtype, side), runs in found.items():
        if side == "other" and (ours := found[dtype, "this"]):
            pairs = [other["step"] / one["step"] for one, other in zip(ours, runs, strict=True)]
            ratios.append(f"{dtype}: {median(pairs):.2f} times as fast ({min(pairs):.2f} to {max(pairs):.2f}).")
    return "\n".join(
        [
            f"{datetime.date.today()}, {describe_machine()}, load average {load:.1f} at the start and "
            f"{load_average():.1f} at the end, `python -m benchmarks.real_step {arguments}`.",
            "",
            f"| dtype | checkout | {' | '.join(f'{column} (s)' for column in columns)} |",
            f"|---|---|{'---:|' * len(columns)}",
            *rows,
            *(["", *ratios] if ratios else []),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.real_step", description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--flags", type=shlex.split, default=[], help="further settings, as one argument")
    parser.add_argument("--flags-here", type=shlex.split, default=[], help="further settings of this checkout alone")
    parser.add_argument("--against", type=Path, help="another checkout, measured in turn with this one")
    parser.add_argument("--out", type=Path, default=Path("runs/real_step"))
    parser.add_argument("--result", type=Path, help="also write the report to this file")
    options = parser.parse_args()
    if options.steps < 2:
        parser.error(f"--steps {options.steps} leaves nothing to time after the first; give 2 or more")
    load, out = load_average(), options.out.absolute()
    make_tiny_model(out / "model", "llama", dtype="bfloat16", **_SHAPE)
    make_arithmetic_data(out / "model" / "data")
    sides = {"this": Path.cwd()} | ({"other": options.against.absolute()} if options.against else {})
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for number in range(options.rounds):
        for dtype in options.dtype:
            for side, checkout in sides.items():
                run = measure(checkout, out / f"{dtype}-{side}-{number}", out / "model", options, dtype)
                found.setdefault((dtype, side), []).append(run)
    text = report(found, load, " ".join(sys.argv[1:]))
    print(text)
    if options.result:
        options.result.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
