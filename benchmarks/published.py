"""Plan steps that authors of other systems published, and compare the predicted seconds with the measured ones.

    python -m benchmarks.published [--rows 0 3 ...] [--result FILE]

It needs no GPU and takes some minutes: models are traced on shapes. ``published.yaml`` says which rows constants may be
chosen from, and which are the test.
"""

import json
import logging
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.report import heading, parser, publish
from slime_like.config import RunConfig
from slime_like.planning.lengths import Lengths
from slime_like.planning.plan import Plan, make_plan
from slime_like.planning.planned_run import PlannedRun

_HERE = Path(__file__).parent
_MODELS = _HERE.parent / "configs" / "models"
_DEEPSEEK = _HERE.parent / "tests" / "unit" / "checks" / "deepseek_v3.json"
_PROMPT = 150
"""Mean prompt of OpenMathInstruct-2 in tokens, about; the mean of prompts and responses together is published."""


@dataclass(frozen=True, slots=True)
class Compared:
    """One published row, and its plan with the fastest settings that fit, or, if none fit, the fastest."""

    row: dict[str, Any]
    plan: Plan

    @property
    def planned(self) -> float:
        step = self.plan.step
        assert step is not None
        return step.training if self.row["what"] == "train" else step.total

    @property
    def ratio(self) -> float:
        return self.planned / self.row["seconds"]


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rows", type=int, nargs="*", help="numbers of rows, from 0 (default: all)")
    options = arguments.parse_args()
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore")
    text = heading()
    listed = yaml.safe_load((_HERE / "published.yaml").read_text(encoding="utf-8"))
    models = listed["models"] | {"DeepSeek-V3": json.loads(_DEEPSEEK.read_text(encoding="utf-8"))}
    rows = listed["rows"]
    found = []
    with tempfile.TemporaryDirectory() as directory:
        for index in options.rows or range(len(rows)):
            found.append(_compare(rows[index], _model(rows[index]["model"], models, Path(directory))))
            print(_line(found[-1]), flush=True)
    if len(found) > 2:
        text += f"\n\nSpearman's rank correlation: {_rank_correlation(found):.3f}"
    publish("\n".join([text, "", *_HEAD, *map(_line, found)]), options.result)


def _rank_correlation(found: list[Compared]) -> float:
    """Return Spearman's coefficient: the correlation of the ranks of measured and planned seconds."""
    pairs = np.array([(each.row["seconds"], each.planned) for each in found])
    return float(np.corrcoef(pairs.argsort(axis=0).argsort(axis=0).T)[0, 1])


def _model(name: str, models: dict[str, Any], directory: Path) -> Path:
    """Return a directory with the model's ``config.json``."""
    if name not in models:
        return _MODELS / name
    path = directory / name
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(models[name]), encoding="utf-8")
    return path


def _compare(row: dict[str, Any], model: Path) -> Compared:
    plans = [make_plan(run) for run in _runs(row, model)]
    plans = [plan for plan in plans if plan.fits] or plans
    return min((Compared(row, plan) for plan in plans), key=lambda each: each.planned)


def _runs(row: dict[str, Any], model: Path) -> Iterator[PlannedRun]:
    """Yield the row's run with every given size of micro-batches."""
    ours, length = row["ours"], row["length" if "length" in row else "max_length"]
    for batch in ours.get("batch", [1]):
        trainer = {
            "backend": ours["backend"],
            "parallel": ours.get("parallel", {}),
            "target_tokens_per_batch": batch * length,
        }
        trainer |= {"recompute": ours.get("recompute", "auto")}
        if ours["backend"] != "fsdp":
            trainer["optimizer"] = {"overlap": True}
        sections = _training(row) if row["what"] == "train" else _rl(row)
        raw = {"run_dir": "/tmp/none", "trainer": trainer} | sections
        raw["model"] = {"path": model, "lora": {"rank": row["lora"]}} if "lora" in row else {"path": model}
        mean = row.get("mean_length", length)
        lengths = Lengths(mean - _PROMPT, length - _PROMPT) if row["what"] == "rl" else None
        yield PlannedRun.of(RunConfig.model_validate(raw), _PROMPT if lengths else None, lengths)


def _training(row: dict[str, Any]) -> dict[str, Any]:
    """Return sections of supervised training on full sequences."""
    prompt = row["length"] // 4
    rollout = {"prompts_per_step": row["sequences"], "max_new_tokens": row["length"] - prompt}
    nodes = max(1, row["gpus"] // 8)
    return {
        "algorithm": {"loss": "sft"},
        "data": {"max_prompt_tokens": prompt},
        "rollout": rollout,
        "cluster": {"nodes": nodes, "gpus_per_node": min(8, row["gpus"])},
    }


def _rl(row: dict[str, Any]) -> dict[str, Any]:
    """Return sections of RL that scores old and reference logprobs. Without staleness, GPUs are shared."""
    parallel = row["ours"]["parallel"]
    trainers = parallel.get("pipeline", 1) * parallel.get("tensor", 1) * parallel.get("context", 1) * parallel["data"]
    shared = row["staleness"] == 0
    rollout = {
        "prompts_per_step": row["samples"] // 32,
        "samples_per_prompt": 32,
        "max_new_tokens": row["max_length"] - _PROMPT,
        "tensor": row["engine"],
        "num_engines": (row["gpus"] if shared else row["gpus"] - trainers) // row["engine"],
        "max_staleness": row["staleness"],
        "max_concurrent_requests": 4096,
        "engine_args": {"vllm": {"gpu_memory_utilization": 0.8 if shared else 0.92}},
    }
    correction = {} if shared else {"importance": {"correction": "truncate"}}
    return {
        "algorithm": {"old_logprobs": "score", "kl": {"coef": 0.01}} | correction,
        "data": {"max_prompt_tokens": _PROMPT},
        "rollout": rollout,
        "cluster": {"nodes": row["gpus"] // 8, "placement": "colocated" if shared else "separate"},
    }


_HEAD = (
    "| run | GPUs | use | measured | planned | ratio | generation, scoring, training, sync | settings | differs |",
    "|---|---:|---|---:|---:|---:|---|---|---|",
)


def _line(found: Compared) -> str:
    row, plan = found.row, found.plan
    step, trainer = plan.step, plan.run.config.trainer
    assert step is not None
    kind = f"{row['what']} {row['model']}" + (" LoRA" if "lora" in row else "")
    kind += f", staleness {row['staleness']}" if row["what"] == "rl" else ""
    parts = ", ".join(f"{seconds:.1f}" for seconds in (step.generation, step.scoring, step.training, step.sync))
    settings = f"{trainer.target_tokens_per_batch:,} tokens, recompute {trainer.recompute}"
    settings += "" if plan.fits else ", does not fit"
    cells = (kind, row["gpus"], row["use"], f"{row['seconds']:g} s", f"{found.planned:.1f} s", f"{found.ratio:.2f}")
    return "| " + " | ".join(map(str, (*cells, parts, settings, row["differs"]))) + " |"


if __name__ == "__main__":
    main()
