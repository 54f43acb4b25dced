"""A part of the objective with its options, in files, in flags and in saved configurations."""

from pathlib import Path
from typing import Any

import pytest

from slime_like.algorithms import build_loss
from slime_like.config.algorithm import AlgorithmConfig
from slime_like.config.reading.load import load_config, save_config

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
    ("{loss: vanilla}", "", "ppo_clip", {}),
    ("{loss: {name: reinforce}}", "", "policy_gradient", {}),
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


def test_each_part_has_its_own_options(tmp_path: Path) -> None:
    flags = "--run_dir r --model.path m --algorithm.advantage reinforce_plus_plus --algorithm.advantage.eps 0.5"
    algorithm = load_config(None, [*flags.split(), "--algorithm.reduction", "{name: constant, length: 8}"]).algorithm
    assert (algorithm.advantage.name, algorithm.advantage.options) == ("reinforce_pp", {"eps": 0.5})
    assert (algorithm.reduction.name, algorithm.reduction.options) == ("constant", {"length": 8})
    assert (algorithm.loss.options, algorithm.least_spread) == ({}, 0.5)


def test_gspo_has_the_papers_bounds() -> None:
    """arXiv:2507.18071, section 5.1."""
    assert (
        repr(build_loss(AlgorithmConfig(loss="gspo"))._policy)
        == "GSPO(clip_low=0.0003, clip_high=0.0004, dual_clip=None)"
    )
