"""Arguments of engines that apply low-rank factors, their first factors, and their sleep."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from rollout.sglang import arguments as sglang
from rollout.vllm import arguments as vllm
from rollout.weight_update import take_factors
from slime_like.checks.engine_arguments import can_keep_weights, copies_weights
from slime_like.config import ModelConfig, RunConfig
from slime_like.errors import CheckpointError
from slime_like.models.dimensions import ModelDimensions
from slime_like.weights.expected_tensors import expected_factors
from slime_like.weights.received import WeightReceiver
from tests.conftest import Tiny
from tests.support.rejections import Rejects

TARGETS = ("self_attn.q_proj", "layers.0.mlp.up_proj", "o_proj")


@pytest.fixture
def model(tiny: Tiny) -> Path:
    return tiny.model


def given(model: Path, engine: str, rank: int = 4, **lora: Any) -> RunConfig:
    settings = {"rank": rank, "targets": TARGETS, "sync": "adapter", **lora}
    return RunConfig(run_dir=Path("run"), model={"path": model, "lora": settings}, rollout={"engine": engine})


@pytest.mark.parametrize(("rank", "room"), [(1, 8), (8, 8), (9, 16), (300, 512), (512, 512)])
def test_vllm_makes_room_for_the_rank(model: Path, rank: int, room: int) -> None:
    found = vllm._owned(given(model, "vllm", rank), 0)
    assert (found["enable_lora"], found["max_lora_rank"], found["max_loras"]) == (True, room, 2)
    assert found["lora_target_modules"] == ["o_proj", "q_proj", "up_proj"]


def test_sglang_gets_the_rank_and_modules(model: Path) -> None:
    found = sglang.engine_arguments(given(model, "sglang", 300), 0, ())
    assert (found["enable_lora"], found["max_lora_rank"], found["lora_strict_loading"]) == (True, 300, True)
    assert found["lora_target_modules"] == ["o_proj", "q_proj", "up_proj"]


def test_engines_of_merged_weights_have_no_adapter(model: Path) -> None:
    config = given(model, "sglang", sync="merged")
    assert not [name for name in vllm._owned(config, 0) | sglang.engine_arguments(config, 0, ()) if "lora" in name]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_sleeping_engines_keep_a_base_that_no_sync_brings(model: Path, engine: str) -> None:
    dimensions = ModelDimensions.from_checkpoint(model)
    for sync in ("adapter", "merged"):
        config = given(model, engine, sync=sync).model_copy(update={"steps": 1})
        assert copies_weights(config, dimensions) is (sync == "adapter")
        assert engine == "vllm" or can_keep_weights(config, dimensions) is (sync == "adapter")


def test_the_first_factors(model: Path, tmp_path: Path, rejects: Rejects) -> None:
    """They are 0, or those of an adapter, until others have arrived."""
    receiver, shapes = WeightReceiver(), expected_factors(ModelConfig.model_validate(given(model, "vllm").model))
    zeros = take_factors(receiver, None, shapes)
    assert {name: tuple(each.shape) for name, each in zeros.items()} == shapes
    assert not any(each.any() for each in zeros.values())
    stored = {name: torch.full(shape, 2.0) for name, shape in shapes.items()}
    save_file(stored, tmp_path / "adapter_model.safetensors")
    read = take_factors(receiver, str(tmp_path), shapes)
    assert read.keys() == stored.keys() and all(torch.equal(read[name], each) for name, each in stored.items())
    receiver.kept = dict(stored)
    assert take_factors(receiver, None, shapes) == stored and receiver.kept == {}
    with rejects(CheckpointError, "tensors-do-not-fit"):
        take_factors(receiver, str(tmp_path), {**shapes, "another.lora_A.weight": (4, 8)})
