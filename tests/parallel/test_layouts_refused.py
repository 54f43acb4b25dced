"""Layouts that a model does not admit are rejected before anything starts, with field, value and remedy."""

from pathlib import Path
from typing import Any

import pytest

from backends.megatron.trainer import MegatronTrainer
from slime_like.config import RunConfig
from tests.parallel.tiny import save_checkpoint

_FAMILIES = ("qwen3", "qwen3_moe", "deepseek_v3")


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """4 layers, 4 heads, 2 KV heads (4 in latent attention); the mixtures have 4 and 8 experts."""
    return {family: save_checkpoint(family, tmp_path_factory.mktemp(family)) for family in _FAMILIES}


def _problems(checkpoint: Path, trainer: dict[str, Any]) -> list[str]:
    return MegatronTrainer.check(RunConfig(run_dir=checkpoint / "run", model={"path": checkpoint}, trainer=trainer))


@pytest.mark.parametrize(
    ("family", "trainer", "words"),
    [
        ("qwen3", {"parallel": {"tensor": 8}}, ["trainer.parallel.tensor=8", "4 attention heads", "use 1, 2 or 4"]),
        ("qwen3", {"parallel": {"tensor": 3}}, ["trainer.parallel.tensor=3", "4 attention heads"]),
        ("qwen3", {"parallel": {"pipeline": 5}}, ["trainer.parallel.pipeline=5", "4 layers"]),
        ("qwen3", {"parallel": {"pipeline": 2, "virtual_pipeline": 4}}, ["virtual_pipeline=4", "4 layers"]),
        ("qwen3", {"parallel": {"virtual_pipeline": 2}}, ["needs trainer.parallel.pipeline above 1"]),
        ("qwen3", {"parallel": {"sequence": True}}, ["trainer.parallel.sequence=true", "tensor above 1"]),
        ("qwen3", {"parallel": {"expert": 2}}, ["trainer.parallel.expert=2", "no experts"]),
        ("qwen3_moe", {"parallel": {"expert": 3, "data": 3}}, ["trainer.parallel.expert=3", "4 experts"]),
        ("qwen3_moe", {"parallel": {"expert": 4, "data": 2}}, ["trainer.parallel.expert=4", "= 2"]),
        ("qwen3_moe", {"parallel": {"tensor": 2}}, ["trainer.parallel.tensor=2", "sequence=true"]),
        ("deepseek_v3", {"parallel": {"tensor": 3, "sequence": True}}, ["tensor=3", "4 attention heads", "2 or 4"]),
        ("deepseek_v3", {"attention": "transformer_engine"}, ["attention=transformer_engine", "latent attention"]),
        ("qwen3", {"optimizer": {"decay": "linear", "warmup_steps": 100}}, ["warmup_steps=100", "100 optimizer steps"]),
        (
            "qwen3",
            {"optimizer": {"weight_decay": 0.1, "final_weight_decay": 0.05}},
            ["final_weight_decay=0.05", "weight_decay=0.1"],
        ),
        ("qwen3", {"optimizer": {"lr": 1e-6, "min_lr": 1e-5}}, ["min_lr=1e-05", "lr=1e-06"]),
    ],
)
def test_impossible_settings_are_refused_with_a_remedy(
    family: str, trainer: dict[str, Any], words: list[str], checkpoints: dict[str, Path]
) -> None:
    problems = _problems(checkpoints[family], trainer)
    assert any(all(word in problem for word in words) for problem in problems), problems


@pytest.mark.parametrize(
    ("family", "trainer"),
    [
        ("qwen3", {}),
        ("qwen3", {"parallel": {"tensor": 2, "sequence": True, "pipeline": 4, "context": 3, "data": 5}}),
        ("qwen3_moe", {"parallel": {"tensor": 2, "sequence": True, "expert": 4, "data": 2}}),
    ],
)
def test_possible_layouts_pass(family: str, trainer: dict[str, Any], checkpoints: dict[str, Path]) -> None:
    assert _problems(checkpoints[family], trainer) == []


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    (problem,) = _problems(tmp_path / "nowhere", {})
    assert "nowhere does not exist" in problem
