"""The FSDP trainer on a CUDA device in bfloat16: scoring, a step, and moving to host memory and back."""

from pathlib import Path

import pytest
import torch

from backends.fsdp.trainer import FsdpTrainer
from slime_like.algorithms.packing.pack import pack_sequences, real_tokens
from slime_like.interfaces import RankPlacement
from slime_like.models.dimensions import ModelDimensions
from tests.parallel.cases import parity_config, samples_with_loss
from tests.parallel.ranks import free_port
from tests.parallel.reference import Reference
from tests.parallel.tiny import save_checkpoint, scored_sequences

pytestmark = pytest.mark.gpu

MEAN_BOUND = 1e-2  # nats per token
LENGTHS = [(5, 9), (3, 1), (11, 6), (60, 2), (2, 150)]


@pytest.mark.parametrize("offload", [False, True], ids=["on the device", "weights in host memory"])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "qwen3_moe"])
def test_scoring_training_and_offloading(family: str, offload: bool, tmp_path: Path) -> None:
    checkpoint = save_checkpoint(family, tmp_path / "model")
    sequences = scored_sequences(LENGTHS)
    config = parity_config(checkpoint, tmp_path / "run", {"backend": "fsdp", "offload": offload}, "bfloat16")
    reference = Reference(checkpoint, config.algorithm)
    reference.round_weights()
    expected = torch.cat([reference.score(sequence)[0].detach() for sequence in sequences])
    trainer = FsdpTrainer(config, RankPlacement(0, 1, 0, "127.0.0.1", free_port()))
    trainer.setup()
    pack = pack_sequences(sequences)
    scored = trainer.score([pack])
    trainer.begin_step(samples_with_loss(sequences), real_tokens([pack]))
    trainer.accumulate([pack], last=True)
    trainer.finish_step(samples_with_loss(sequences))
    before = trainer.score([pack])
    held = torch.cuda.memory_allocated()
    trainer.offload(keep_weights=True)
    trainer.offload()
    moved = torch.cuda.memory_allocated()
    trainer.onload()
    after = trainer.score([pack])
    trainer.shutdown()
    assert scored is not None and before is not None and after is not None
    gaps = (scored[0]["old_logprobs"].cpu().double() - expected).abs()
    assert float(gaps.mean()) < MEAN_BOUND
    assert not torch.equal(before[0]["old_logprobs"], scored[0]["old_logprobs"])
    assert torch.equal(before[0]["old_logprobs"], after[0]["old_logprobs"])
    # The difference, because cuBLAS's workspace stays. Each parameter has a main weight and moments.
    parameters = ModelDimensions.from_checkpoint(checkpoint).num_parameters
    assert held - moved >= (0 if offload else 12 * parameters)
