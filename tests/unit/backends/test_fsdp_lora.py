"""Low-rank factors of transformers' modules: which parameters get some, and which targets are rejected."""

from pathlib import Path

import torch

from backends.fsdp.model import meta_model
from backends.fsdp.weights import checkpoint_shapes, piece_shapes
from slime_like.config import LoraConfig, ModelConfig
from slime_like.errors import ConfigError
from slime_like.examples.tiny_model import make_tiny_model
from slime_like.models.weight_files import header_shapes
from slime_like.weights.adapter import factor_shapes
from tests.parallel.tiny import save_checkpoint
from tests.support.rejections import Rejects


def _model(path: Path, **lora: object) -> ModelConfig:
    return ModelConfig(path=path, dtype="bfloat16", lora=LoraConfig(**{"rank": 2, **lora}))  # type: ignore[arg-type]


def test_factors_are_float32_and_the_frozen_base_is_not(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "qwen3_moe", num_hidden_layers=2)
    settings = _model(tmp_path, targets="up_proj,o_proj")
    model = meta_model(settings, torch.float32)
    trained = model.stored_by_name()
    assert piece_shapes(model, trained) == factor_shapes(settings.lora, header_shapes(tmp_path))
    assert checkpoint_shapes(model) == header_shapes(tmp_path)
    assert {each.dtype for each in trained.values()} == {torch.float32}
    others = [each for name, each in model.parameters_by_name().items() if name not in trained]
    assert {(each.dtype, each.requires_grad) for each in others} == {(torch.bfloat16, False)}


def test_targets_that_are_not_linear_layers_are_rejected(tmp_path: Path, rejects: Rejects) -> None:
    path = save_checkpoint("gpt2", tmp_path)
    with rejects(ConfigError, "config") as caught:
        meta_model(_model(path), torch.float32)
    assert "transformer.h.0.attn.c_attn.weight is a matrix of a Conv1D" in str(caught.value)
    with rejects(ConfigError, "config") as caught:
        meta_model(_model(path, targets="q_proj"), torch.float32)
    assert "targets=['q_proj']: no matrix of the model" in str(caught.value)
