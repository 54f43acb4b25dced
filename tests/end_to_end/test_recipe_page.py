"""Each recipe in ``docs/recipes.md`` is accepted, planned at its size, and trained for two small steps."""

import math
import re
from functools import reduce
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from slime_like.config import RunConfig
from slime_like.config.reading.load import save_config
from slime_like.examples.tiny_model import make_tiny_model
from slime_like.planning.plan import make_plan
from slime_like.planning.planned_run import PlannedRun
from tests.conftest import Tiny
from tests.end_to_end.test_train import steps_of
from tests.support.shared_cluster import train_together
from tests.unit.checks.checkpoint import EXPERTS, write_checkpoint

PAGE = Path(__file__).parents[2] / "docs" / "recipes.md"
RECIPES: dict[str, dict[str, Any]] = {
    heading: yaml.safe_load(block)
    for heading, block in re.findall(r"^## ([^\n]+)\n(?:(?!^## ).)*?^```yaml\n(.*?)^```", PAGE.read_text(), re.S | re.M)
}
MOE, DISTILLATION = "Mixture of experts", "On-policy distillation"
RATE = 0.05
# An untrained model never adds right, but it writes letters by chance.
REWARD: dict[str, Any] = {"name": "format", "options": {"pattern": ".*[a-m].*"}}
# Layouts, losses and corrections set different fields, so one run tests several recipes.
WITH = {
    "Long context": ("REINFORCE++ with baseline", "TIS"),
    "One GPU": ("CISPO", "MIS"),
    "LoRA": ("Dr. GRPO",),
    "Asynchronous": ("RLOO",),
    MOE: ("GSPO",),
}
QUICK = ("DAPO", "REINFORCE++", "Asynchronous", "LoRA", DISTILLATION)
"""Other tests train with a critic, experts, shared GPUs and on several ranks."""
OTHERS = tuple(name for name in RECIPES if name not in (*QUICK, *chain(*WITH.values())))
_LIMITS: dict[str, Any] = {
    "rollout": {"prompts_per_step": 8, "samples_per_prompt": 4, "max_new_tokens": 8},
    "algorithm": {"reduction": {"length": 8}, "overlong": {"buffer": 4}, "minibatches": 2},
}


def merged(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """Merge ``more`` into ``base``. An empty mapping replaces the section."""
    both = dict(base)
    for key, value in more.items():
        nested = isinstance(value, dict) and value and isinstance(both.get(key), dict)
        both[key] = merged(both[key], value) if nested else value
    return both


def limited(values: dict[str, Any], limits: dict[str, Any]) -> dict[str, Any]:
    """Return the values that have a limit, at most as large as it."""
    found: dict[str, Any] = {}
    for key, limit in limits.items():
        value = values.get(key)
        if isinstance(limit, dict):
            found[key] = limited(value, limit) if isinstance(value, dict) else {}
        elif value is not None:
            found[key] = min(value, limit)
    return {key: value for key, value in found.items() if value != {}}


def small(recipe: dict[str, Any], tiny: Tiny, model: Path, run_dir: Path) -> dict[str, Any]:
    """Shrink the recipe for a tiny model on a CPU. The method stays."""
    machine = {
        "run_dir": run_dir,
        "steps": 2,
        "model": {"path": model, "dtype": "float32"},
        "data": {"train": [tiny.data / "train.jsonl"], "max_prompt_tokens": 48},
        "rollout": {"engine": "transformers", "engine_args": {}, **_LIMITS["rollout"]},
        "reward": {"functions": [REWARD]},
        "trainer": {"target_tokens_per_batch": 256, "cpu_threads": 1, "optimizer": {"warmup_steps": 0}},
        "checkpoint": {"export_hf": False},
        "logging": {"progress": "plain", "tensorboard": False},
    }
    if "distillation" in recipe:
        machine |= {
            "distillation": {"path": run_dir.parent / "teacher"},
            "reward": {"functions": [REWARD | {"weight": 0}]},
        }
    return merged(merged(recipe, machine), limited(recipe, _LIMITS))


def test_the_page_has_the_recipes() -> None:
    assert len(RECIPES) == 17 and {"GRPO", "LoRA", "DAPO", "GSPO", MOE, "One GPU"} <= RECIPES.keys()


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_is_planned_at_its_size(name: str, tmp_path: Path) -> None:
    """The model has two small layers: lengths, counts and rules are checked."""
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "max_position_embeddings": 32768}
    model = write_checkpoint(tmp_path / "model", **(EXPERTS if name == MOE else {}), **sizes)
    (model / "model.safetensors").unlink()  # only config.json is needed
    base = {"run_dir": tmp_path / "run", "model": {"path": model}, "trainer": {"target_tokens_per_batch": 24576}}
    base |= {"cluster": {"gpus_per_node": 8}, "rollout": {"num_engines": 1}}
    teacher = {"distillation": {"path": model}} if name == DISTILLATION else {}
    plan = make_plan(PlannedRun.of(RunConfig.model_validate(merged(merged(base, RECIPES[name]), teacher))))
    assert plan.problems == [] and plan.fits
    assert plan.gpus_in_use == {"Long context": 3, MOE: 3, DISTILLATION: 3, "One GPU": 1}.get(name, 2)


@pytest.mark.parametrize("names", [QUICK, pytest.param(OTHERS, marks=pytest.mark.acceptance)], ids=["quick", "others"])
def test_every_recipe_trains(names: tuple[str, ...], tiny: Tiny, tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "experts", family="deepseek_v3", seed=0)
    make_tiny_model(tmp_path / "teacher", seed=1)
    runs = {name: RECIPES[name] for name in names}
    for name in WITH.keys() & runs.keys():
        parts = [RECIPES[part] for part in (name, *WITH[name])]
        runs[name] = reduce(merged, parts)
        assert all(merged(runs[name], part) == runs[name] for part in parts)  # no value replaces another
    if MOE in runs:
        runs[MOE] = merged(runs[MOE], {"trainer": {"router_bias_rate": RATE}})
    files = [tmp_path / f"{name}.yaml" for name in runs]
    for file, recipe in zip(files, runs.values(), strict=True):
        model = tmp_path / "experts" if file.stem == MOE else tiny.model
        settings = small(recipe, tiny, model, tmp_path / file.stem)
        settings["checkpoint"] = {"export_hf": file.stem == MOE}
        save_config(RunConfig.model_validate(settings), file)
    train_together([["train", str(file)] for file in files], tmp_path)
    steps = {name: steps_of(tmp_path / name) for name in runs}
    for name, rows in steps.items():
        algorithm = runs[name].get("algorithm", {})
        assert [row["step"] for row in rows] == [1, 2], name
        assert all(math.isfinite(row["train_actor_training/grad_norm"]) for row in rows), name
        assert any(row["train_actor_training/grad_norm"] > 0 for row in rows), name
        assert (rows[1]["train_actor_training/kl_loss"] > 0) == ("kl" in algorithm), name
        assert (rows[0]["train_actor_training/importance_weight"] > 0.9) == ("importance" in algorithm), name
        assert (rows[1]["train_actor_training/moe_aux_loss"] > 0) == (name == MOE), name
        assert (abs(rows[0].get("train_actor_training/distillation_kl", 0)) > 1e-5) == (name == DISTILLATION), name
        assert (rows[1]["train_actor_training/router_load_max"] >= 1) == (name == MOE), name
        assert name != "DAPO" or all(row["rollout/zero_spread_groups"] == 0 for row in rows)
    if MOE in runs:
        check_biases(tmp_path / "experts", tmp_path / MOE, steps[MOE])


def check_biases(model: Path, run_dir: Path, rows: list[dict[str, Any]]) -> None:
    """Four updates moved the biases, each by the rate or not at all. The engine routes by them."""
    before, after = (load_file(path / "model.safetensors") for path in (model, run_dir / "hf"))
    moves = (
        torch.cat([after[name] - before[name] for name in before if name.endswith("e_score_correction_bias")]) / RATE
    )
    assert torch.isclose(moves, moves.round(), atol=1e-4).all() and 1 <= moves.abs().max() < 4.5
    assert all(row["weights/probe_gap"] < 1e-4 for row in rows)
    assert f"trainer.router_bias_rate={RATE}" in (run_dir / "driver.log").read_text()
