"""Train two steps, export, save; another object scores with what was saved."""

import tempfile
from pathlib import Path

import torch

from slime_like.algorithms import pack_sequences
from slime_like.config import AlgorithmConfig, ModelConfig, RunConfig
from slime_like.examples.tiny_model import make_tiny_model
from slime_like.interfaces import RankPlacement, load_backend
from slime_like.trajectory import UnscoredTrajectory
from slime_like.weights.expected_tensors import expected_tensors

with tempfile.TemporaryDirectory() as directory:
    model, checkpoint = Path(directory) / "model", Path(directory) / "checkpoint"
    make_tiny_model(model)
    config = RunConfig(
        run_dir=directory,
        model=ModelConfig(path=model, dtype="float32"),
        algorithm=AlgorithmConfig(loss="sft"),
        trainer={"backend": "plain", "optimizer": {"lr": 1e-3}, "backend_args": {"amsgrad": True}},
    )
    trainer, scorer = (load_backend("plain")(config, RankPlacement(0, 1, 0, "127.0.0.1", 0)) for _ in range(2))
    trainer.setup()
    demonstrations = [
        UnscoredTrajectory(
            prompt_tokens=torch.tensor([9, 8]),
            response_tokens=torch.tensor([7, 6, 5]),
            prompt_len=2,
            response_len=3,
            logprobs=None,
            answer="",
            sequence_id=f"0-{i}",
            policy_version=0,
            group_id=0,
            loss_mask=torch.ones(3, dtype=torch.bool),
        )
        for i in range(2)
    ]
    pack = pack_sequences(demonstrations)
    losses = []
    for _ in range(2):
        trainer.begin_step()
        trainer.accumulate([pack])
        trainer.accumulate([pack])  # a second window
        losses.append(float(trainer.finish_step(denominator=12.0).loss))
    assert losses[1] < losses[0]
    exported = {name: tuple(tensor.shape) for bucket in trainer.export_weights() for name, tensor in bucket.tensors}
    assert exported == expected_tensors(model)
    trainer.save(checkpoint)
    scorer.setup_for_scoring(checkpoint)
    torch.testing.assert_close(scorer.score([pack])[0], trainer.score([pack])[0])
