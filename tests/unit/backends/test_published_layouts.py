"""Names and shapes of published checkpoints that are too large to come here, against what the families' rules expect.

Two witnesses: the layout of DeepSeek-V3's own 163 files, written down from a public listing of their headers, and the
modules of transformers at the sizes of the published ``config.json``, on the meta device.
"""

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion

from backends.megatron.conversion.families import family_of
from slime_like.models.dimensions import ModelDimensions
from tests.unit.backends.models import MOONLIGHT
from tests.unit.checks.checkpoint import DEEPSEEK_V3

Shape = tuple[int, ...]

# Ranges of layers and of experts, as the listing groups them. Layer 61 is the one for multi-token prediction.
_LISTING: dict[str, Shape] = {
    "lm_head.weight": (129280, 7168),
    "model.embed_tokens.weight": (129280, 7168),
    "model.layers.0-2.mlp.down_proj.weight": (7168, 18432),
    "model.layers.0-2.mlp.gate_proj.weight": (18432, 7168),
    "model.layers.0-2.mlp.up_proj.weight": (18432, 7168),
    "model.layers.0-61.input_layernorm.weight": (7168,),
    "model.layers.0-61.post_attention_layernorm.weight": (7168,),
    "model.layers.0-61.self_attn.kv_a_layernorm.weight": (512,),
    "model.layers.0-61.self_attn.kv_a_proj_with_mqa.weight": (576, 7168),
    "model.layers.0-61.self_attn.kv_b_proj.weight": (32768, 512),
    "model.layers.0-61.self_attn.o_proj.weight": (7168, 16384),
    "model.layers.0-61.self_attn.q_a_layernorm.weight": (1536,),
    "model.layers.0-61.self_attn.q_a_proj.weight": (1536, 7168),
    "model.layers.0-61.self_attn.q_b_proj.weight": (24576, 1536),
    "model.layers.3-61.mlp.experts.0-255.down_proj.weight": (7168, 2048),
    "model.layers.3-61.mlp.experts.0-255.gate_proj.weight": (2048, 7168),
    "model.layers.3-61.mlp.experts.0-255.up_proj.weight": (2048, 7168),
    "model.layers.3-61.mlp.gate.e_score_correction_bias": (256,),
    "model.layers.3-61.mlp.gate.weight": (256, 7168),
    "model.layers.3-61.mlp.shared_experts.down_proj.weight": (7168, 2048),
    "model.layers.3-61.mlp.shared_experts.gate_proj.weight": (2048, 7168),
    "model.layers.3-61.mlp.shared_experts.up_proj.weight": (2048, 7168),
    "model.layers.61.eh_proj.weight": (7168, 14336),
    "model.layers.61.embed_tokens.weight": (129280, 7168),
    "model.layers.61.enorm.weight": (7168,),
    "model.layers.61.hnorm.weight": (7168,),
    "model.layers.61.shared_head.head.weight": (129280, 7168),
    "model.layers.61.shared_head.norm.weight": (7168,),
    "model.norm.weight": (7168,),
}


def _spelled_out(listing: dict[str, Shape]) -> dict[str, Shape]:
    """One entry per tensor."""
    every: dict[str, Shape] = {}
    for pattern, shape in listing.items():
        parts = [re.fullmatch(r"(\d+)-(\d+)", part) or part for part in pattern.split(".")]
        choices = [
            [part] if isinstance(part, str) else [str(n) for n in range(int(part[1]), int(part[2]) + 1)]
            for part in parts
        ]
        every |= {".".join(names): shape for names in product(*choices)}
    return every


def _dimensions(directory: Path, config: dict[str, Any]) -> ModelDimensions:
    (directory / "config.json").write_text(json.dumps(config | {"model_type": "deepseek_v3"}))
    return ModelDimensions.from_checkpoint(directory)


def test_the_rules_are_of_every_tensor_in_deepseek_v3_s_published_files(tmp_path: Path) -> None:
    """All but the layer for multi-token prediction. (The files' 8-bit matrices have scales; such are rejected.)"""
    published = _spelled_out(_LISTING)
    unscaled = 4 + 59 + 1  # embeddings and heads, routers, eh_proj
    scales = sum(1 for shape in published.values() if len(shape) == 2) - unscaled
    assert len(published) + scales == 91_991  # as the listing says
    model = _dimensions(tmp_path, DEEPSEEK_V3)
    kept = {name: shape for name, shape in published.items() if not model.is_ignored(name)}
    assert {name for name in published if name not in kept} == {
        name for name in published if name.startswith("model.layers.61.")
    }
    assert family_of(model).hf_shapes(model) == kept


@pytest.mark.parametrize("config", [DEEPSEEK_V3, MOONLIGHT], ids=["DeepSeek-V3", "Moonlight-16B-A3B"])
def test_the_rules_are_of_what_transformers_would_write_at_published_sizes(
    config: dict[str, Any], tmp_path: Path
) -> None:
    model = _dimensions(tmp_path, config)
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    tensors = revert_weight_conversion(module, module.state_dict())
    assert family_of(model).hf_shapes(model) == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
