"""The loss from logits, in one tensor or in chunks, packed or padded, against a dense computation."""

import math

import pytest
import torch
from torch import Tensor

from slime_like.algorithms import GRPOLoss
from slime_like.config.algorithm import AlgorithmConfig
from slime_like.plugins.objective import LOSSES, STEP_LOSSES
from tests.unit.algorithms.cases import close, dense_scores, options_of


def logits_case() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    logits = torch.randn(4, 6, 11, generator=g, dtype=torch.float64).requires_grad_()
    targets = torch.randint(0, 11, (4, 6), generator=g)
    reference = -3 * torch.rand(4, 6, generator=g, dtype=torch.float64)
    advantages = torch.randn(4, generator=g, dtype=torch.float64)
    return logits, targets, reference, advantages, torch.rand(4, 6, generator=g) > 0.3


@pytest.mark.parametrize("sizes", [[6], [1, 5], [2, 2, 2], [4, 1, 1]], ids=str)
def test_chunked_padded_logits(sizes: list[int]) -> None:
    """Chunks of any sizes match a plain dense computation."""
    logits, targets, reference, advantages, mask = logits_case()
    loss, policy, kl, ratio, clipfrac, logprobs = GRPOLoss(AlgorithmConfig(kl={"coef": 0.2})).forward(
        list(logits.split(sizes, dim=1)), targets, reference, advantages, mask
    )
    expected, _ = dense_scores(logits, targets)
    difference = reference - expected
    dense_kl = (difference.exp() - difference - 1)[mask].mean()
    dense_policy = -(advantages[:, None].expand(4, 6)[mask]).mean()
    assert torch.allclose(logprobs, expected)
    assert (policy.item(), kl.item()) == pytest.approx((dense_policy.item(), dense_kl.item()))
    assert (ratio.item(), clipfrac.item()) == (1.0, 0.0)
    assert loss.item() == pytest.approx((dense_policy + 0.2 * dense_kl).item())
    surrogate = -(advantages[:, None] * expected)[mask].mean() + 0.2 * dense_kl
    gradients = [torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (loss, surrogate)]
    assert torch.allclose(*gradients, atol=1e-14)


@pytest.mark.parametrize("reduction", ["tokens", "samples", "groups", "constant"])
@pytest.mark.parametrize("name", [name for name in LOSSES if name not in STEP_LOSSES])
def test_packed_and_padded_agree(reduction: str, name: str) -> None:
    logits, targets, reference, advantages, _ = logits_case()
    old = (dense_scores(logits, targets)[0] + 0.1).detach()
    lengths = torch.tensor([6, 2, 5, 1])
    mask = torch.arange(6)[None] < lengths[:, None]
    config = AlgorithmConfig(loss=name, kl={"coef": 0.2}, reduction={"name": reduction, **options_of(reduction)})
    groups = [1, 1, 2, 2]
    padded = GRPOLoss(config).forward(logits, targets, reference, advantages, mask, old_logprobs=old, group_ids=groups)
    packed = GRPOLoss(config).forward(
        logits[mask],
        targets[mask],
        reference[mask],
        advantages.repeat_interleave(lengths),
        old_logprobs=old[mask],
        response_lens=lengths,
        group_ids=groups,
    )
    for a, b in zip(padded[:5], packed[:5], strict=True):
        assert a.item() == pytest.approx(b.item(), rel=1e-12)
    gradients = [torch.autograd.grad(x[0], logits, retain_graph=True)[0] for x in (padded, packed)]
    assert torch.allclose(*gradients, atol=1e-15)


def test_each_form_of_a_value_gives_the_same() -> None:
    """One temperature or one per token, one advantage per sequence or per token, group ids in a list or a tensor."""
    logits, targets, reference, advantages, _ = logits_case()
    lengths = torch.tensor([6, 2, 5, 1])
    mask = torch.arange(6)[None] < lengths[:, None]
    loss = GRPOLoss(AlgorithmConfig(kl={"coef": 0.2}, reduction="groups"))
    given = (logits[mask], targets[mask], reference[mask])
    further = {"old_logprobs": reference[mask] - 0.2, "response_lens": lengths}
    one = loss(*given, advantages, group_ids=[1, 1, 2, 2], temperature=0.7, **further)
    spread, groups = advantages.repeat_interleave(lengths), torch.tensor([1, 1, 2, 2])
    other = loss(*given, spread, group_ids=groups, temperature=torch.full((14,), 0.7, dtype=torch.float64), **further)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert one == (one.loss, one.policy_loss, one.kl_loss, one.ratio, one.clip_fraction, one.logprobs)
    assert close(one.logprobs, dense_scores(logits[mask] / 0.7, targets[mask])[0].detach(), 1e-12)
    singles = loss(*(x[:2] for x in given), advantages[:2], response_lens=torch.tensor([1, 1]), group_ids=[1, 2])
    assert singles.policy_loss.item() == pytest.approx(-float(advantages[:2].mean()))


def test_supervised_loss_needs_no_advantages() -> None:
    loss, *_ = GRPOLoss(AlgorithmConfig(loss="sft")).forward(torch.zeros(2, 5), torch.tensor([0, 0]), None, None)
    assert loss.item() == pytest.approx(math.log(5))
