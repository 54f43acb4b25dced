"""New model families, as in ``docs/extending.md``: one file and one registration each.

Seed-OSS has known layers and needs only a reader. SmolLM3's layers are of two kinds, with and without rotary embedding.

Two sequence-parallel ranks export its weights bit for bit, and compute the logprobs of transformers' own model.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from transformers import SeedOssConfig, SeedOssForCausalLM, SmolLM3Config, SmolLM3ForCausalLM

from backends.megatron.attention import PackedCoreAttention, RotatedCoreAttention
from backends.megatron.families import MegatronFamily
from slime_like.algorithms.packing.pack import pack_sequences
from slime_like.config import RunConfig
from slime_like.interfaces import RankPlacement
from slime_like.models import config_json
from slime_like.models.dimensions import FAMILIES, Attention, Family, ModelDimensions
from tests.parallel.ranks import run_ranks
from tests.parallel.reference import Reference
from tests.parallel.steps import exported_from, running, same_bits
from tests.parallel.tiny import VOCAB, scored_sequences, tiny_config

LENGTHS = [(5, 9), (3, 12)]
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 1}
SEED_OSS = Family("seed_oss", "SeedOssForCausalLM", lambda raw: config_json.decoder(raw, qkv_bias=True))


# ----------------------------------------------------------------------------------------- layers with and without rope
@dataclass(frozen=True, slots=True)
class SometimesRotated(Attention):
    """Grouped-query attention; ``rotated`` says for each layer whether it has rotary embedding."""

    rotated: tuple[int, ...]


class MegatronSide(MegatronFamily):
    def settings(self, dimensions: ModelDimensions) -> dict[str, Any]:
        assert isinstance(dimensions.attention, SometimesRotated)
        skips = [1 - rotated for rotated in dimensions.attention.rotated]
        return super().settings(dimensions) | {"no_rope_freq": skips}

    def attention(self, config: TransformerConfig, layer: int, attention: ModuleSpec) -> ModuleSpec:
        skips = config.no_rope_freq[layer]  # type: ignore[index]
        attention.submodules.core_attention = RotatedCoreAttention if skips else PackedCoreAttention
        return attention


SMOLLM3 = Family(
    "smollm3",
    "SmolLM3ForCausalLM",
    lambda raw: config_json.decoder(raw, attention=SometimesRotated(tuple(raw["no_rope_layers"]))),
    megatron=f"{__name__}:MegatronSide",
)


def _score(placement: RankPlacement, config: RunConfig) -> tuple[Tensor, dict[str, Tensor]]:
    known = patch.dict(FAMILIES, seed_oss=SEED_OSS, smollm3=SMOLLM3)
    with known, running(placement, config, scores=True) as trainer:
        scored = trainer.score([pack_sequences(scored_sequences(LENGTHS))])
        assert scored is not None
        return scored[0]["old_logprobs"], exported_from(trainer)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (SeedOssForCausalLM, SeedOssConfig(**SIZES, **HEADS)),
        (SmolLM3ForCausalLM, SmolLM3Config(**SIZES, **HEADS, no_rope_layers=[1, 0])),
    ],
)
def test_it_is_loaded_scored_and_exported(kind: Any, config: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = kind(config).float()
    torch.nn.utils.vector_to_parameters(
        0.2 * torch.randn(sum(p.numel() for p in model.parameters())), model.parameters()
    )
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").unlink(missing_ok=True)
    run = tiny_config(tmp_path / "model", tmp_path, {"tensor": 2, "sequence": True})
    (logprobs, exported), (_, others) = run_ranks(_score, 2, tmp_path / "ranks", run)
    assert not others
    same_bits(exported, dict(model.named_parameters()))
    reference = Reference(tmp_path / "model", run.algorithm)
    expected = torch.cat([reference.score(sequence)[0].detach() for sequence in scored_sequences(LENGTHS)])
    torch.testing.assert_close(logprobs.double(), expected, rtol=0, atol=1e-5)
