"""Values that follow from others: sizes that fill the cluster, timeouts, and parts with their options."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from slime_like.algorithms import build_loss
from slime_like.checks import training_needs
from slime_like.checks.check import check_settings
from slime_like.checks.layout import idle_gpu_problems
from slime_like.config import RunConfig
from slime_like.config.algorithm import AlgorithmConfig
from slime_like.config.filling import AUTO, ENGINES, REPLICAS, gpus_needed
from slime_like.config.reading.load import load_config, save_config
from slime_like.models.dimensions import ModelDimensions

ROOT = Path(__file__).parents[3]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
GPU_RECIPES = [path for path in CONFIGS if "gpus_per_node" in path.read_text()]
BOTH = f"--{REPLICAS} {AUTO} --{ENGINES} {AUTO}"
CRITIC = "--algorithm.advantage gae --critic.placement separate --critic.parallel.tensor 2"
WORKERS = "--reference.placement workers --reference.workers 2 --reference.parallel.tensor 4 --algorithm.kl.coef 0.1"
SIZE = "--cluster.gpus_per_node 8 --cluster.nodes"


def load(flags: str) -> RunConfig:
    return load_config(None, ["--run_dir", "/x", "--model.path", "/y", *shlex.split(flags)])


@pytest.mark.parametrize(
    ("placement", "flags", "data", "engines"),
    [
        ("colocated", f"{BOTH} {SIZE} 1", 8, 8),
        ("colocated", f"{BOTH} {SIZE} 8 --trainer.parallel.pipeline 2 --trainer.parallel.context 4", 8, 64),
        ("colocated", f"{BOTH} {SIZE} 5 --trainer.parallel.tensor 2 --trainer.parallel.pipeline 4", 5, 40),
        ("colocated", f"{BOTH} {SIZE} 2 --trainer.parallel.tensor 2 --rollout.tensor 4 {WORKERS}", 4, 2),
        ("colocated", f"--{ENGINES} {AUTO} {SIZE} 2 --{REPLICAS} 6 --rollout.tensor 4", 6, 1),
        ("separate", f"--{REPLICAS} {AUTO} {SIZE} 3 --{ENGINES} 2 --rollout.tensor 4 {WORKERS}", 8, 2),
        ("separate", f"--{ENGINES} {AUTO} {SIZE} 2 --{REPLICAS} 4 --rollout.tensor 4", 4, 3),
        ("separate", f"--{ENGINES} {AUTO} {SIZE} 4 --{REPLICAS} 2 --rollout.tensor 8 {WORKERS}", 2, 2),
        ("separate", f"--{REPLICAS} {AUTO} {SIZE} 2 --{ENGINES} 4 {CRITIC}", 4, 4),  # 4 replicas, of 1 and 2 ranks
        ("separate", f"--{REPLICAS} {AUTO} {SIZE} 2 --{ENGINES} 4 {CRITIC} --critic.parallel.data 1", 10, 4),
        ("separate", f"{BOTH} {SIZE} 1 --algorithm.loss sft", 8, 8),  # the number of engines is unused
        ("separate", f"--{REPLICAS} {AUTO} {SIZE} 1 --{ENGINES} 9", 1, 9),  # too few GPUs; rejected elsewhere
    ],
)
def test_auto_fills_the_cluster(placement: str, flags: str, data: int, engines: int, tmp_path: Path) -> None:
    config = load(f"{flags} --cluster.placement {placement}")
    assert (config.trainer.parallel.data, config.rollout.num_engines) == (data, engines)
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config  # as numbers


@pytest.mark.parametrize(
    ("flags", "idle"),
    [
        ("--cluster.placement colocated --trainer.parallel.tensor 8", "8 of 16"),
        ("--trainer.parallel.data 4 --rollout.num_engines 4", "8 of 16"),
        ("--algorithm.loss sft", "15 of 16"),
    ],
)
def test_idle_gpus_are_a_problem(flags: str, idle: str) -> None:
    (problem,) = idle_gpu_problems(load(f"{SIZE} 2 {flags}"))
    assert problem.startswith(f"cluster.nodes=2 times cluster.gpus_per_node=8: {idle} GPUs are idle")
    assert not list(idle_gpu_problems(load(f"{SIZE} 2 {flags} --cluster.allow_idle_gpus true")))
    assert not list(idle_gpu_problems(load(flags)))  # the cluster's size is unknown


@pytest.mark.parametrize("nodes", [1, 2, 5, 8])
@pytest.mark.parametrize("path", GPU_RECIPES, ids=lambda path: path.stem)
def test_recipes_use_every_gpu(path: Path, nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their settings are accepted on other numbers of nodes."""
    monkeypatch.chdir(ROOT)
    config = load_config(path, ["--cluster.nodes", str(nodes)])
    assert gpus_needed(config).total == nodes * config.cluster.gpus_per_node
    found = check_settings(
        config, ModelDimensions.from_checkpoint(config.model.path), training_needs(config) - {"code"}
    )
    assert found == []


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_no_recipe_has_a_bound_without_effect(path: Path) -> None:
    """With one update per batch, every ratio is 1, so nothing is ever clipped."""
    algorithm = load_config(path).algorithm
    several = algorithm.epochs * algorithm.minibatches > 1
    assert several or algorithm.loss.name in ("policy_gradient", "sft")
    if not several:
        assert not {"clip_low", "clip_high", "dual_clip"} & algorithm.loss.options.keys()


def _config(**sections: Any) -> RunConfig:
    return RunConfig(run_dir=Path("run"), model={"path": "model"}, **sections)


@pytest.mark.parametrize(
    ("rollout", "evaluation", "expected"),
    [
        ({"max_new_tokens": 3000}, {}, 600),
        ({"max_new_tokens": 16_384}, {}, 3276.8),
        ({"max_new_tokens": 1024}, {"max_new_tokens": 8192}, 1638.4),  # held-out responses may be longer
        ({"max_new_tokens": 16_384, "request_timeout_s": 30}, {}, 30),
    ],
)
def test_a_request_may_take_as_long_as_its_longest_response(
    rollout: dict[str, Any], evaluation: dict[str, Any], expected: float
) -> None:
    assert _config(rollout=rollout, evaluation=evaluation).request_timeout_s == pytest.approx(expected)


@pytest.mark.parametrize(("given", "expected"), [(None, (300, 1200)), (40, (40, 40))])
def test_engines_on_gpus_have_more_time_to_start(given: float | None, expected: tuple[float, float]) -> None:
    config = _config(rollout={"start_timeout_s": given})
    assert (config.engine_start_timeout_s, config.for_gpu_engines().engine_start_timeout_s) == expected


HEAD = "run_dir: r\nmodel: {path: m}\n"
# YAML below ``algorithm``, flags, and the name and the options of the loss.
LOSSES: list[tuple[str, str, str, dict[str, Any]]] = [
    ("{}", "", "ppo_clip", {}),
    ("{loss: gspo}", "", "gspo", {}),
    ("{loss: {name: gspo, clip_low: 1.0e-3}}", "", "gspo", {"clip_low": 1e-3}),
    ("{loss: {dual_clip: 3}}", "", "ppo_clip", {"dual_clip": 3}),
    ("{loss: {name: ppo_clip, dual_clip: none}}", "", "ppo_clip", {"dual_clip": None}),
    ("{loss: gspo}", "--algorithm.loss.clip_low 2e-3", "gspo", {"clip_low": 2e-3}),
    ("{}", "--algorithm.loss.clip_low 0.1", "ppo_clip", {"clip_low": 0.1}),
    ("{loss: {clip_low: 0.1}}", "--algorithm.loss.clip_high 0.3", "ppo_clip", {"clip_low": 0.1, "clip_high": 0.3}),
    ("{loss: {clip_low: 0.1}}", "--algorithm.loss.clip_low 0.3", "ppo_clip", {"clip_low": 0.3}),
    ("{loss: {name: gspo, clip_low: 0.1}}", "--algorithm.loss cispo", "cispo", {}),
    ("{loss: {clip_low: 0.1}}", "algorithm.loss=cispo algorithm.loss.clip_high=4", "cispo", {"clip_high": 4}),
    ("{loss: {clip_low: 0.1}}", "algorithm.loss.clip_high=4 algorithm.loss=cispo", "cispo", {}),
    (
        "{loss: {name: 'my.losses:Own', rate: 2, nested: {a: [1]}}}",
        "",
        "my.losses:Own",
        {"rate": 2, "nested": {"a": [1]}},
    ),
]


@pytest.mark.parametrize(("text", "flags", "name", "options"), LOSSES, ids=[f"{c[0]} {c[1]}" for c in LOSSES])
def test_options_are_merged_and_a_name_removes_earlier_ones(
    tmp_path: Path, text: str, flags: str, name: str, options: dict[str, Any]
) -> None:
    (tmp_path / "run.yaml").write_text(f"{HEAD}algorithm: {text}\n")
    config = load_config(tmp_path / "run.yaml", flags.split())
    assert (config.algorithm.loss.name, config.algorithm.loss.options) == (name, options)
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(tmp_path / "saved.yaml") == config


def test_parts_have_their_own_options_and_the_papers_bounds(tmp_path: Path) -> None:
    flags = "--run_dir r --model.path m --algorithm.advantage reinforce_pp --algorithm.advantage.eps 0.5"
    algorithm = load_config(None, [*flags.split(), "--algorithm.reduction", "{name: constant, length: 8}"]).algorithm
    assert (algorithm.advantage.name, algorithm.advantage.options) == ("reinforce_pp", {"eps": 0.5})
    assert (algorithm.reduction.name, algorithm.reduction.options) == ("constant", {"length": 8})
    assert (algorithm.loss.options, algorithm.least_spread) == ({}, 0.5)
    # arXiv:2507.18071, section 5.1.
    assert (
        repr(build_loss(AlgorithmConfig(loss="gspo"))._policy)
        == "GSPO(clip_low=0.0003, clip_high=0.0004, dual_clip=None)"
    )
