"""Scoring on a CUDA device in bfloat16 agrees with Hugging Face's float32 model with the same rounded weights."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from backends.megatron.trainer import MegatronTrainer
from slime_like.algorithms.packing.pack import pack_sequences
from slime_like.interfaces import RankPlacement
from tests.parallel.cases import parity_config
from tests.parallel.one_device import LENGTHS, MEAN_BOUND, expected_logprobs, logprobs_of
from tests.parallel.ranks import free_port
from tests.parallel.tiny import save_checkpoint, scored_sequences

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "qwen3_moe"])
@pytest.mark.parametrize("attention", ["ring", "transformer_engine"])
def test_logprobs_are_hugging_faces(family: str, attention: str, tmp_path: Path) -> None:
    if attention == "transformer_engine" and find_spec("transformer_engine") is None:
        pytest.skip("Transformer Engine is not installed")
    checkpoint = save_checkpoint(family, tmp_path / "model")
    config = parity_config(checkpoint, tmp_path / "run", {"attention": attention}, "bfloat16")
    sequences = scored_sequences(LENGTHS)
    expected = expected_logprobs(checkpoint, config, sequences)
    trainer = MegatronTrainer(config, RankPlacement(0, 1, 0, "127.0.0.1", free_port()))
    trainer.setup_for_scoring()
    try:
        gaps = (logprobs_of(trainer, [pack_sequences(sequences)]).double() - expected).abs()
    finally:
        trainer.shutdown()
    assert float(gaps.mean()) < MEAN_BOUND
