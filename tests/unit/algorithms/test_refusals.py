"""What would be broadcast, read as an index, or rounded away is refused or done in higher precision."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from slime_like.algorithms import sum_of_sample_mean
from slime_like.algorithms.gae import gae
from slime_like.algorithms.losses import GRPOLoss, LossInputs, build_loss
from slime_like.algorithms.losses.value import value_loss
from slime_like.algorithms.shaping import kl_penalty
from slime_like.config.algorithm import AlgorithmConfig

NAN = float("nan")


def inputs() -> LossInputs:
    generator = torch.Generator().manual_seed(0)

    def values() -> Tensor:
        return -torch.rand(4, generator=generator)

    return LossInputs(
        logprobs=values().requires_grad_(), entropy=values(), old_logprobs=values(), behaviour_logprobs=values(),
        ref_logprobs=values(), advantages=values(), loss_mask=torch.tensor([True, True, False, True]),
        token_weights=torch.ones(4), response_lens=torch.tensor([3, 1]),
    )  # fmt: skip


@pytest.mark.parametrize(
    "name",
    ["entropy", "old_logprobs", "behaviour_logprobs", "ref_logprobs", "advantages", "loss_mask", "token_weights"],
)
@pytest.mark.parametrize("shape", ["column", "one", "short"])
def test_a_loss_broadcasts_nothing(name: str, shape: str) -> None:
    given = inputs()
    value = getattr(given, name)
    changed = {"column": value[:, None], "one": value[:1], "short": value[:3]}[shape]
    with pytest.raises(ValueError, match=rf"{name} has shape .*, logprobs \(4,\)"):
        build_loss(AlgorithmConfig())(replace(given, **{name: changed}))


def test_a_mask_of_numbers_is_no_mask() -> None:
    with pytest.raises(ValueError, match=r"loss_mask is torch.int64; give a bool"):
        build_loss(AlgorithmConfig())(replace(inputs(), loss_mask=torch.tensor([1, 1, 0, 1])))
    ones = torch.ones(3)
    with pytest.raises(ValueError, match=r"loss_mask is torch.int64; give a bool"):
        gae(torch.ones(1), ones, torch.tensor([1, 0, 1]), torch.tensor([3]))
    with pytest.raises(ValueError, match=r"loss_mask is torch.float32; give a bool"):
        value_loss(ones, ones, ones, ones, ones)


def test_a_masked_weight_has_no_effect() -> None:
    given = inputs()
    loss = build_loss(AlgorithmConfig())
    poisoned = replace(given, token_weights=torch.tensor([1.0, 1.0, NAN, 1.0]))
    expected, found = loss(given).loss, loss(poisoned).loss
    assert torch.equal(expected, found)
    (gradient,) = torch.autograd.grad(found, given.logprobs)
    assert bool(torch.isfinite(gradient).all()) and gradient[2] == 0


@pytest.mark.parametrize("where", range(4))
def test_a_masked_value_has_no_effect(where: int) -> None:
    """Neither on the critic's loss nor on its gradient, whichever of the four tensors holds it."""
    mask = torch.tensor([True, False, True])
    tensors = [
        torch.tensor([0.5, 0.7, -0.3]),
        torch.tensor([0.1, 0.2, 0.3]),
        torch.tensor([1.0, 2.0, 3.0]),
        torch.ones(3),
    ]
    expected = value_loss(tensors[0], tensors[1], tensors[2], mask, tensors[3], clip=0.2)
    tensors[where][1] = NAN
    tensors[0].requires_grad_()
    found = value_loss(tensors[0], tensors[1], tensors[2], mask, tensors[3], clip=0.2)
    assert torch.equal(found.loss, expected.loss) and torch.equal(found.clipped, expected.clipped)
    (gradient,) = torch.autograd.grad(found.loss, tensors[0])
    assert bool(torch.isfinite(gradient).all()) and gradient[1] == 0


def test_values_that_would_be_broadcast() -> None:
    mask, ones = torch.ones(3, dtype=torch.bool), torch.ones(3)
    with pytest.raises(ValueError, match=r"values \(3, 1\), old_values \(3,\)"):
        value_loss(ones[:, None], ones, ones, mask, ones)
    with pytest.raises(ValueError, match=r"token_rewards \(2,\) need one entry per value, \(3,\)"):
        gae(torch.ones(1), ones, mask, torch.tensor([3]), token_rewards=torch.ones(2))


def test_padded_input() -> None:
    logits, targets = torch.zeros(2, 3, 5), torch.ones(2, 3, dtype=torch.int64)
    loss = GRPOLoss(AlgorithmConfig())
    with pytest.raises(ValueError, match=r"padding_masks \(2, 1\) and targets \(2, 3\) differ"):
        loss.forward(logits, targets, None, torch.ones(2), torch.ones(2, 1, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"temperature=0.0 is not positive"):
        loss.forward(logits, targets, None, torch.ones(2), temperature=0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_adds_up(dtype: torch.dtype) -> None:
    """4,096 equal values: sums in the values' own type would stand still."""
    values = torch.full((4096,), 0.1, dtype=dtype)
    mean = sum_of_sample_mean(values, [4096], [torch.ones(4096)])
    assert float(mean) == pytest.approx(float(values[0]), rel=1e-6)
    mask = torch.ones(4096, dtype=torch.bool)
    per_token, total = kl_penalty(values, torch.zeros_like(values), mask, torch.tensor([4096]), coefficient=1.0)
    assert float(total) == pytest.approx(float(per_token.double().sum()), rel=1e-6)


def test_a_masked_token_has_no_part_in_the_mean() -> None:
    x = torch.tensor([1.0, NAN, 3.0], requires_grad=True)
    mean = sum_of_sample_mean(x, [3], [torch.tensor([True, False, True])])
    assert float(mean.detach()) == 2.0
    (gradient,) = torch.autograd.grad(mean, x)
    assert gradient.tolist() == [0.5, 0.0, 0.5]
