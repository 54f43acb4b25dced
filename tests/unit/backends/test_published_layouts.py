"""Names and shapes of large published checkpoints match the families' rules.

The reference is the model of transformers with the published ``config.json``, on the meta device.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion

from backends.megatron.families import family_of
from slime_like.models.dimensions import ModelDimensions
from tests.unit.backends.models import MOONLIGHT
from tests.unit.checks.checkpoint import DEEPSEEK_V3

# Fewer layers and experts than published take less time; every kind of layer is left.
_DEEPSEEK = [
    DEEPSEEK_V3 | {"num_hidden_layers": 5, "n_routed_experts": 16},
    MOONLIGHT | {"num_hidden_layers": 3, "n_routed_experts": 8},
]
# The published sizes are transformers' defaults.
_HYBRID = [
    kind(architectures=[architecture]).to_dict() | {"num_experts": 3, "num_experts_per_tok": 2}
    for kind, architecture in (
        (transformers.Qwen3NextConfig, "Qwen3NextForCausalLM"),
        (transformers.Qwen3_5TextConfig, "Qwen3_5ForCausalLM"),
        (transformers.Qwen3_5MoeTextConfig, "Qwen3_5MoeForCausalLM"),
    )
]


@pytest.mark.parametrize("config", [*_DEEPSEEK, *_HYBRID], ids=lambda config: config["architectures"][0])
def test_the_rules_match_what_transformers_would_write_at_published_sizes(
    config: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v3"} | config))
    model = ModelDimensions.from_checkpoint(tmp_path)
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    tensors = revert_weight_conversion(module, module.state_dict())
    assert family_of(model).hf_shapes(model) == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
