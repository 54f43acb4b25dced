"""Rotary frequencies and rotation agree with Hugging Face's own functions."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from backends.megatron.rotary import Rotary, apply_rotary, rotary_table
from slime_like.errors import ConfigError
from slime_like.models.dimensions import ModelDimensions
from tests.parallel.tiny import LLAMA3_SCALING

_LLAMA3 = LLAMA3_SCALING | {"rope_theta": 500000.0, "factor": 8.0, "original_max_position_embeddings": 32}
_YARN: tuple[dict[str, Any], ...] = (
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 24.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
    },
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "attention_factor": 1.3},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "truncate": False},
)


def _dimensions(directory: Path, rope: dict[str, Any]) -> tuple[ModelDimensions, LlamaConfig]:
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=100,
        rope_parameters={"rope_theta": 500000.0, **rope},
    )
    (directory / "config.json").write_text(json.dumps(config.to_dict()))
    return ModelDimensions.from_checkpoint(directory), config


@pytest.mark.parametrize("rope", [{"rope_type": "default"}, {"rope_type": "linear", "factor": 4.0}, _LLAMA3, *_YARN])
def test_rotation_is_hugging_faces(rope: dict[str, Any], tmp_path: Path) -> None:
    dimensions, config = _dimensions(tmp_path, rope)
    generator = torch.Generator().manual_seed(0)
    positions = torch.randint(0, 5000, (50,), generator=generator)
    q, k = torch.randn(50, 2, 32, generator=generator), torch.randn(50, 1, 32, generator=generator)
    cos, sin = LlamaRotaryEmbedding(config)(q, positions[None])
    expected = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    rotary = Rotary.of(dimensions)
    table = [part * rotary.magnitude for part in rotary_table(rotary.inv_freq, positions, torch.float32)]
    for ours, theirs in zip((q, k), expected, strict=True):
        torch.testing.assert_close(apply_rotary(ours, *table), theirs[0].transpose(0, 1), rtol=0, atol=2e-6)


def test_backward_is_the_inverse_rotation() -> None:
    x = torch.randn(6, 2, 8, dtype=torch.float64, requires_grad=True)
    angles = torch.rand(6, 1, 4, dtype=torch.float64)
    for interleaved in (False, True):
        assert torch.autograd.gradcheck(lambda t: apply_rotary(t, angles.cos(), angles.sin(), interleaved), (x,))  # noqa: B023


def test_interleaved_rotation_turns_neighbours() -> None:
    """Compared with complex numbers that hold a pair each."""
    x, angles = torch.randn(6, 2, 8), torch.rand(6, 1, 4)
    expected = torch.view_as_complex(x.unflatten(-1, (4, 2))) * torch.polar(torch.ones_like(angles), angles)
    found = apply_rotary(x, angles.cos(), angles.sin(), interleaved=True)
    torch.testing.assert_close(found, torch.view_as_real(expected).flatten(-2))


def test_an_unknown_scaling_is_rejected(tmp_path: Path) -> None:
    dimensions, _ = _dimensions(tmp_path, {"rope_type": "default"})
    dimensions = replace(dimensions, rope_scaling={"rope_type": "dynamic", "factor": 4.0})
    with pytest.raises(ConfigError, match="'dynamic' is not supported; use linear, llama3, yarn or none"):
        Rotary.of(dimensions)
