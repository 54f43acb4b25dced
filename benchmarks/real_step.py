"""Time a step with a model of real size on a CPU, by phase: ``python -m benchmarks.real_step [--result FILE]``.

The model has the shape of SmolLM2-135M (30 layers, 9 heads, 3 KV heads, 49,152 tokens) and random weights; nothing is
downloaded. A step samples 16 prompts 8 times, 64 tokens each, and makes one update. ``--against DIR`` alternates with
another checkout of this project, so that a drift of the machine's speed affects both. ``--flags`` gives both additional
settings, e.g. another model and its data; ``--flags-here`` gives only this one settings that the other does not have.
"""

import argparse
import os
import shlex
import sys
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import flags, heading, parser, publish, run_to_its_end, steady_steps, table
from slime_like.examples.tiny_model import make_arithmetic_data, make_tiny_model
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


def measure(checkout: Path, run_dir: Path, model: Path, options: argparse.Namespace, dtype: str) -> dict[str, float]:
    """Return median seconds of all steps but the first, which touches memory for the first time."""
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
    more = options.flags + (options.flags_here if checkout == Path.cwd() else [])
    command = [str(Path(sys.executable).parent / "slime-like"), "train", *flags(settings), *more]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    run_to_its_end(command, run_dir.with_suffix(".log"), cwd=checkout, env=environment)
    steps = steady_steps(run_dir, 1)
    names = {"step": STEP_TIME, **{phase: phase_seconds(phase) for phase in _PHASES}}
    return {column: median(float(step[name]) for step in steps) for column, name in names.items()}


def report(found: dict[tuple[str, str], list[dict[str, float]]]) -> str:
    columns = ("step", *_PHASES)
    rows = [
        [dtype, side, *(f"{median(run[column] for run in runs):.2f}" for column in columns)]
        for (dtype, side), runs in found.items()
    ]
    text = table(f"dtype | checkout | {' (s) | '.join(columns)} (s)", rows)
    for (dtype, side), runs in found.items():
        if side == "other":
            pairs = [other["step"] / ours["step"] for ours, other in zip(found[dtype, "this"], runs, strict=True)]
            text += f"\n\n{dtype}: {median(pairs):.2f} times as fast ({min(pairs):.2f} to {max(pairs):.2f})."
    return text


def main() -> None:
    options = parser(__doc__)
    add = options.add_argument
    add("--dtype", nargs="+", default=["float32", "bfloat16"])
    add("--engine", default="vllm")
    add("--steps", type=int, default=3)
    add("--new-tokens", type=int, default=64)
    add("--rounds", type=int, default=1)
    add("--flags", type=shlex.split, default=[], help="further settings, as one argument")
    add("--flags-here", type=shlex.split, default=[], help="further settings of this checkout alone")
    add("--against", type=Path, help="another checkout, measured in turn with this one")
    add("--out", type=Path, default=Path("runs/real_step"))
    chosen = options.parse_args()
    head, out = heading(), chosen.out.absolute()
    make_tiny_model(out / "model", "llama", dtype="bfloat16", **_SHAPE)
    make_arithmetic_data(out / "model" / "data")
    sides = {"this": Path.cwd()} | ({"other": chosen.against.absolute()} if chosen.against else {})
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    for number in range(chosen.rounds):
        for dtype in chosen.dtype:
            for side, checkout in sides.items():
                run = measure(checkout, out / f"{dtype}-{side}-{number}", out / "model", chosen, dtype)
                found.setdefault((dtype, side), []).append(run)
    publish(f"{head}\n\n{report(found)}", chosen.result)


if __name__ == "__main__":
    main()
