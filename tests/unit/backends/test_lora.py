"""Values of low-rank factors that do not come from training."""

import torch

from backends.common.trainer.lora import Initial, Trial, initial_a

A, B = "base_model.model.lm.q_proj.lora_A.weight", "base_model.model.lm.q_proj.lora_B.weight"
SHAPES = {A: (4, 64), B: (32, 4)}


def test_a_trial_starts_like_training_but_with_a_product() -> None:
    start, trial = Initial(SHAPES), Trial(SHAPES)
    assert torch.equal(start.read(A, 0, 0, 4), initial_a(A, (4, 64)))
    assert torch.equal(trial.read(A, 1, 16, 8), start.read(A, 0, 0, 4)[:, 16:24])
    assert not start.read(B, 0, 0, 32).any()
    whole = trial.read(B, 0, 0, 32)
    assert whole.all() and 0.04 < float(whole.abs().max()) <= 0.05
    assert torch.equal(trial.read(B, 0, 8, 4), whole[8:12])
