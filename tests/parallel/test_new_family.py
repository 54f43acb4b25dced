"""A new model family of known layers needs only a reader: Seed-OSS, as in ``docs/extending.md``.

Two sequence-parallel ranks export its weights bit for bit, and compute the logprobs of transformers' own model.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import SeedOssConfig, SeedOssForCausalLM

from slime_like.algorithms.packing.pack import pack_sequences
from slime_like.config import RunConfig
from slime_like.interfaces import RankPlacement
from slime_like.models import config_json
from slime_like.models.family import FAMILIES, Family
from tests.parallel.ranks import run_ranks
from tests.parallel.reference import Reference
from tests.parallel.steps import exported_from, running, same_bits
from tests.parallel.tiny import VOCAB, scored_sequences, tiny_config

LENGTHS = [(5, 9), (3, 12)]
SEED_OSS = Family("seed_oss", "SeedOssForCausalLM", lambda raw: config_json.decoder(raw, qkv_bias=True))
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 1}


@contextmanager
def _known() -> Iterator[None]:
    with patch.dict(FAMILIES, seed_oss=SEED_OSS):
        yield


def _score(placement: RankPlacement, config: RunConfig) -> tuple[Tensor, dict[str, Tensor]]:
    with _known(), running(placement, config, scores=True) as trainer:
        scored = trainer.score([pack_sequences(scored_sequences(LENGTHS))])
        assert scored is not None
        return scored[0].logprobs, exported_from(trainer)


def test_it_is_loaded_scored_and_exported(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = SeedOssForCausalLM(SeedOssConfig(**SIZES, **HEADS)).float()
    torch.nn.utils.vector_to_parameters(
        0.2 * torch.randn(sum(p.numel() for p in model.parameters())), model.parameters()
    )
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "generation_config.json").unlink(missing_ok=True)
    config = tiny_config(tmp_path / "model", tmp_path, {"tensor": 2, "sequence": True})
    (logprobs, exported), (_, others) = run_ranks(_score, 2, tmp_path / "ranks", config)
    assert not others
    same_bits(exported, model.state_dict())
    reference = Reference(tmp_path / "model", config.algorithm)
    expected = torch.cat([reference.score(sequence)[0].detach() for sequence in scored_sequences(LENGTHS)])
    torch.testing.assert_close(logprobs.double(), expected, rtol=0, atol=1e-5)
