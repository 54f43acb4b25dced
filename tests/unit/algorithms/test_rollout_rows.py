"""Weights and settings of rollouts that are several training rows. ``tests/parallel`` trains on such rows."""

import pytest
import torch

from slime_like.algorithms import LossInputs, build_loss, pack_sequences, step_denominator, token_weights
from slime_like.config.algorithm import AlgorithmConfig
from slime_like.plugins.objective import LOSSES, SEQUENCE_LOSSES, STEP_LOSSES
from tests.unit.algorithms.cases import batch


def test_a_published_example() -> None:
    """A has 50 + 100 tokens, B 3 x 30 and C 40, each with loss 1. Every rollout contributes a third of the mean.

    If rows were samples, B would contribute half of it.
    """
    counts, rollouts = [50, 100, 30, 30, 30, 40], list("AABBBC")
    weights = token_weights("samples", counts, [0] * 6, rollout_ids=rollouts)
    assert weights == [1 / 150, 1 / 150, 1 / 90, 1 / 90, 1 / 90, 1 / 40]
    assert step_denominator("samples", counts, [0] * 6, rollouts) == 3.0
    parts = {name: sum(w * n for w, n, r in zip(weights, counts, rollouts, strict=True) if r == name) for name in "ABC"}
    assert parts == pytest.approx({"A": 1.0, "B": 1.0, "C": 1.0})
    assert sum(parts.values()) / 3 == pytest.approx(1.0, rel=1e-15)


def test_rollouts_that_do_not_fit_are_rejected() -> None:
    with pytest.raises(ValueError, match="rollout id"):
        token_weights("tokens", [1, 2], [0, 0], rollout_ids=["a"])
    with pytest.raises(ValueError, match=r"row 1 of rollout 'a' is in group 1"):
        step_denominator("samples", [1, 2], [0, 1], ["a", "a"])


def test_settings_per_sequence() -> None:
    """Settings that need sequence lengths are listed by name. A level without a correction has no effect."""
    assert AlgorithmConfig(importance={"level": "sequence"}).per_sequence == ()
    corrected = {"correction": "mask", "veto": 1e-4, "level": "geometric"}
    assert AlgorithmConfig(importance=corrected).per_sequence == (
        "importance.level=geometric", "importance.veto=0.0001",
    )  # fmt: skip
    (row,) = batch([(3, 4)])
    pack = pack_sequences([row])
    for name in LOSSES.keys() - STEP_LOSSES:
        config = AlgorithmConfig(loss=name)
        others = pack.old_logprobs, pack.logprobs, pack.ref_logprobs, pack.advantages
        inputs = LossInputs(torch.zeros(4), pack.loss_mask, pack.token_weights, torch.zeros(4), *others)
        if name in SEQUENCE_LOSSES:
            assert config.per_sequence == (f"loss={name}",)
            with pytest.raises(ValueError, match="response_lens"):
                build_loss(config)(inputs)
        else:
            assert config.per_sequence == () and build_loss(config)(inputs).loss.isfinite()
