"""The FSDP trainer on a CUDA device in bfloat16: scoring, a step, and moving to host memory and back."""

from pathlib import Path

import pytest
import torch

from backends.fsdp.trainer import FsdpTrainer
from slime_like.algorithms.packing.pack import pack_sequences, real_tokens
from slime_like.interfaces import RankPlacement
from slime_like.models.dimensions import ModelDimensions
from tests.parallel.cases import parity_config, samples_with_loss
from tests.parallel.one_device import LENGTHS, MEAN_BOUND, expected_logprobs, logprobs_of
from tests.parallel.ranks import free_port
from tests.parallel.tiny import save_checkpoint, scored_sequences

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("offload", [False, True], ids=["on the device", "weights in host memory"])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "qwen3_moe"])
def test_scoring_training_and_offloading(family: str, offload: bool, tmp_path: Path) -> None:
    checkpoint = save_checkpoint(family, tmp_path / "model")
    sequences = scored_sequences(LENGTHS)
    config = parity_config(checkpoint, tmp_path / "run", {"backend": "fsdp", "offload": offload}, "bfloat16")
    expected = expected_logprobs(checkpoint, config, sequences)
    trainer = FsdpTrainer(config, RankPlacement(0, 1, 0, "127.0.0.1", free_port()))
    trainer.setup()
    pack = pack_sequences(sequences)
    first = logprobs_of(trainer, [pack])
    trainer.begin_step(samples_with_loss(sequences), real_tokens([pack]))
    trainer.accumulate([pack], last=True)
    trainer.finish_step(samples_with_loss(sequences))
    before = logprobs_of(trainer, [pack])
    held = torch.cuda.memory_allocated()
    trainer.offload(keep_weights=True)
    trainer.offload()
    moved = torch.cuda.memory_allocated()
    trainer.onload()
    after = logprobs_of(trainer, [pack])
    trainer.shutdown()
    assert float((first.double() - expected).abs().mean()) < MEAN_BOUND
    assert not torch.equal(before, first) and torch.equal(before, after)
    # The difference, because cuBLAS's workspace stays. Each parameter has a main weight and moments.
    parameters = ModelDimensions.from_checkpoint(checkpoint).num_parameters
    assert held - moved >= (0 if offload else 12 * parameters)
