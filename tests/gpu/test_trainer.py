"""The Megatron trainer on a CUDA device in bfloat16: gradients, a step, and moving to host memory and back."""

from pathlib import Path

import pytest
import torch

from backends.megatron.trainer import MegatronTrainer
from slime_like.algorithms.packing.pack import pack_sequences, real_tokens
from slime_like.interfaces import RankPlacement
from slime_like.trajectory import PackedTrajectory
from tests.parallel.cases import WIDE_CLIP, parity_config, samples_with_loss
from tests.parallel.checks import check_tensors
from tests.parallel.layouts import Settings
from tests.parallel.one_device import LENGTHS, gradients_of, logprobs_of, unwaiting
from tests.parallel.ranks import free_port
from tests.parallel.reference import Reference
from tests.parallel.tiny import save_checkpoint, scored_sequences

pytestmark = pytest.mark.gpu

GRADIENT_BOUND = 5e-2  # relative by norm, as on a CPU in bfloat16
STATE_BYTES = 2 + 4 + 4 + 8  # per parameter: weight, gradient, main weight, moments


@pytest.mark.parametrize(
    "settings",
    [{}, {"distributed": True}, {"recompute": "full"}, {"recompute": 1}, {"activation_offload": True}],
    ids=["plain", "distributed optimizer", "full recompute", "one layer recomputed", "activations in host memory"],
)
def test_gradients_a_step_and_offloading(settings: Settings, tmp_path: Path) -> None:
    checkpoint = save_checkpoint("qwen3", tmp_path / "model")
    sequences = scored_sequences(LENGTHS)
    config = parity_config(checkpoint, tmp_path / "run", {"attention": "ring", **settings}, "bfloat16", **WIDE_CLIP)
    reference = Reference(checkpoint, config.algorithm)
    reference.round_weights()
    denominator, pack = samples_with_loss(sequences), pack_sequences(sequences)
    expected = reference.step(sequences, denominator).gradients
    trainer = MegatronTrainer(config, RankPlacement(0, 1, 0, "127.0.0.1", free_port()))
    trainer.setup()
    try:
        check_tensors(gradients_of(trainer, [pack], denominator, waits=True), expected, GRADIENT_BOUND)
        first = logprobs_of(trainer, [pack])
        _step(trainer, pack, denominator)
        before = logprobs_of(trainer, [pack])
        gradients = gradients_of(trainer, [pack], denominator, waits=True)
        held = torch.cuda.memory_allocated()
        trainer.offload(keep_weights=True)
        assert torch.equal(logprobs_of(trainer, [pack]), before)
        trainer.offload()
        # The difference, because cuBLAS's workspace stays.
        parameters = sum(p.numel() for chunk in trainer.chunks for p in chunk.parameters())
        assert held - torch.cuda.memory_allocated() >= STATE_BYTES * parameters
        trainer.onload()
        assert torch.equal(logprobs_of(trainer, [pack]), before) and not torch.equal(before, first)
        check_tensors(gradients_of(trainer, [pack], denominator, waits=True), gradients, GRADIENT_BOUND)
        trainer.save(tmp_path / "checkpoint")
        _step(trainer, pack, denominator)
        after = logprobs_of(trainer, [pack])
        assert not torch.equal(after, before)
        trainer.load(tmp_path / "checkpoint")
        assert torch.equal(logprobs_of(trainer, [pack]), before)
        _step(trainer, pack, denominator)  # with the moments and counters of the checkpoint
        assert (logprobs_of(trainer, [pack]) - after).abs().max() <= (after - before).abs().max() / 2
    finally:
        trainer.shutdown()


def _step(trainer: MegatronTrainer, pack: PackedTrajectory, denominator: float) -> None:
    trainer.begin_step(denominator, real_tokens([pack]))
    with unwaiting():
        trainer.accumulate([pack], last=True)
    trainer.finish_step(denominator)
