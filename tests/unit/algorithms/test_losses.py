"""Losses against their published formulas, token by token in Python, and their gradients by autograd of the formula."""

import math
from dataclasses import fields, replace

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from slime_like.algorithms import LossInputs, LossSums, build_loss, value_loss
from slime_like.algorithms.losses import PolicyTerms, kl_estimate
from slime_like.config.algorithm import AlgorithmConfig
from tests.support.rejections import Rejects

LENGTHS = [5, 1, 8]
TOTAL = sum(LENGTHS)


def make_inputs(seed: int = 0, distance: float = 0.5) -> LossInputs:
    """Three sequences; current, old and engine policies differ by about ``distance`` nats per token."""
    g = torch.Generator().manual_seed(seed)

    def noise() -> Tensor:
        return distance * torch.randn(TOTAL, generator=g, dtype=torch.float64)

    old = -3 * torch.rand(TOTAL, generator=g, dtype=torch.float64)
    mask = torch.rand(TOTAL, generator=g) > 0.3
    return LossInputs(
        logprobs=(old + noise()).requires_grad_(),
        entropy=torch.rand(TOTAL, generator=g, dtype=torch.float64).requires_grad_(),
        old_logprobs=old,
        behaviour_logprobs=old + noise(),
        ref_logprobs=old + noise(),
        advantages=torch.randn(3, generator=g, dtype=torch.float64).repeat_interleave(torch.tensor(LENGTHS)),
        loss_mask=mask,
        token_weights=torch.rand(TOTAL, generator=g, dtype=torch.float64),
        response_lens=torch.tensor(LENGTHS),
    )


def clip(x: float, low: float, high: float) -> float:
    return max(low, min(high, x))


# ------------------------------------------------------------------------------------------- formulas, token by token
def ppo(ratio: float, a: float, low: float = 0.2, high: float = 0.2, dual: float | None = None) -> float:
    objective = min(ratio * a, clip(ratio, 1 - low, 1 + high) * a)
    if dual is not None and a < 0:
        objective = max(objective, dual * a)
    return -objective


TOKEN_FORMULAS = [
    ({"loss": "ppo_clip"}, lambda lp, old, a: ppo(math.exp(lp - old), a)),
    ({"loss": "ppo_clip", "clip_low": 0.1, "clip_high": 0.4}, lambda lp, old, a: ppo(math.exp(lp - old), a, 0.1, 0.4)),
    ({"loss": "ppo_clip", "dual_clip": 1.5}, lambda lp, old, a: ppo(math.exp(lp - old), a, dual=1.5)),
    ({"loss": "policy_gradient"}, lambda lp, old, a: -a * lp),
    ({"loss": "cispo", "clip_high": 0.3}, lambda lp, old, a: -clip(math.exp(lp - old), 0.8, 1.3) * a * lp),
    ({"loss": "cispo", "clip_low": 1.0}, lambda lp, old, a: -clip(math.exp(lp - old), 0.0, 1.2) * a * lp),
    ({"loss": "sft"}, lambda lp, old, a: -lp),
]


@pytest.mark.parametrize(("settings", "formula"), TOKEN_FORMULAS, ids=[str(s) for s, _ in TOKEN_FORMULAS])
def test_token_losses(settings, formula) -> None:  # type: ignore[no-untyped-def]
    inputs = make_inputs()
    output = build_loss(AlgorithmConfig(**settings))(inputs)
    rows = zip(
        inputs.logprobs.tolist(),
        inputs.old_logprobs.tolist(),
        inputs.advantages.tolist(),
        inputs.loss_mask.tolist(),
        inputs.token_weights.tolist(),
        strict=True,
    )
    expected = sum(w * formula(lp, old, a) for lp, old, a, kept, w in rows if kept)
    assert output.loss.item() == pytest.approx(expected, rel=1e-12)
    assert output.sums.policy_loss.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("settings", "formula"), TOKEN_FORMULAS, ids=[str(s) for s, _ in TOKEN_FORMULAS])
def test_token_gradients(settings, formula) -> None:  # type: ignore[no-untyped-def]
    """Central differences of the formula; CISPO's weight is a constant there, as its stop-gradient says."""
    inputs, h = make_inputs(), 1e-6
    actual = torch.autograd.grad(build_loss(AlgorithmConfig(**settings))(inputs).loss, inputs.logprobs)[0]
    for i in range(TOTAL):
        lp, old, a = (x[i].item() for x in (inputs.logprobs, inputs.old_logprobs, inputs.advantages))
        if settings["loss"] == "cispo":
            slope = formula(lp, old, a) / lp
        else:
            slope = (formula(lp + h, old, a) - formula(lp - h, old, a)) / (2 * h)
        expected = slope * inputs.token_weights[i].item() * bool(inputs.loss_mask[i])
        assert actual[i].item() == pytest.approx(expected, abs=1e-7)


def test_gspo() -> None:
    """One ratio per sequence, over its loss-carrying tokens, clipped as a whole."""
    inputs = make_inputs(distance=0.3)
    config = AlgorithmConfig(loss="gspo", clip_low=0.05, clip_high=0.1)
    output = build_loss(config)(inputs)
    expected, ratios, start = torch.zeros((), dtype=torch.float64), [], 0
    for n in LENGTHS:
        part = slice(start, start + n)
        kept = inputs.loss_mask[part]
        ratio = (inputs.logprobs - inputs.old_logprobs)[part][kept].mean().exp() if kept.any() else torch.ones(())
        a = inputs.advantages[start]
        loss = -torch.minimum(ratio * a, ratio.clamp(0.95, 1.1) * a)
        expected = expected + (loss * inputs.token_weights[part] * kept).sum()
        ratios += [ratio.item()] * int(kept.sum())
        start += n
    assert output.loss.item() == pytest.approx(expected.item(), rel=1e-12)
    gradients = [torch.autograd.grad(x, inputs.logprobs, retain_graph=True)[0] for x in (output.loss, expected)]
    assert torch.allclose(*gradients, rtol=1e-11, atol=1e-13)
    assert output.sums.ratio.item() == pytest.approx(sum(ratios))


# --------------------------------------------------------------------------------------------- ratio and its figures
def test_ratio_and_clip_fraction_come_from_the_old_policy() -> None:
    inputs = make_inputs()
    stats = build_loss(AlgorithmConfig())(inputs).sums.to_stats(4.0, 1.5, 1e-3)
    kept = inputs.loss_mask
    ratios = (inputs.logprobs - inputs.old_logprobs).exp()[kept]
    a = inputs.advantages[kept]
    clipped = ((ratios > 1.2) & (a > 0)) | ((ratios < 0.8) & (a < 0))
    assert stats.ratios.item() == pytest.approx(ratios.mean().item()) and abs(stats.ratios.item() - 1) > 0.01
    assert 0 < clipped.double().mean() < 1
    assert stats.clipfrac.item() == pytest.approx(clipped.double().mean().item())
    assert stats.old_gap_max.item() == pytest.approx((inputs.logprobs - inputs.old_logprobs)[kept].abs().max().item())
    gap = (inputs.behaviour_logprobs - inputs.old_logprobs)[kept].abs()
    assert stats.engine_gap_mean.item() == pytest.approx(gap.mean().item())
    assert stats.engine_gap_max.item() == pytest.approx(gap.max().item())
    assert stats.entropy.item() == pytest.approx(inputs.entropy[kept].mean().item())
    difference = (inputs.ref_logprobs - inputs.logprobs)[kept]
    assert stats.approx_policy_kls.item() == pytest.approx((difference.exp() - 1 - difference).mean().item())
    assert (stats.num_tokens.item(), stats.grad_norm.item(), stats.learning_rate.item()) == (
        kept.sum().item(),
        1.5,
        1e-3,
    )


def test_the_dual_clip_counts_as_clipped() -> None:
    inputs = make_inputs()
    inputs = replace(inputs, advantages=-inputs.advantages.abs())
    sums = build_loss(AlgorithmConfig(dual_clip=1.5))(inputs).sums
    ratios, a = (inputs.logprobs - inputs.old_logprobs).exp()[inputs.loss_mask], inputs.advantages[inputs.loss_mask]
    by_dual = (a < 0) & (ratios > 1.5)
    clipped = ((ratios > 1.2) & (a > 0)) | ((ratios < 0.8) & (a < 0)) | by_dual
    assert by_dual.any() and sums.clipped.item() == clipped.sum().item()


def test_figures_of_a_loss_without_a_ratio_and_of_no_tokens() -> None:
    inputs = make_inputs()
    loss = build_loss(AlgorithmConfig(loss="policy_gradient"))
    ratios = (inputs.logprobs - inputs.old_logprobs).exp()[inputs.loss_mask]
    assert loss(inputs).sums.ratio.item() == pytest.approx(ratios.sum().item())
    stats = loss(replace(inputs, loss_mask=torch.zeros(TOTAL, dtype=torch.bool))).sums.to_stats(1.0, 0.0, 0.0)
    assert [stats.ratios, stats.entropy, stats.clipfrac, stats.engine_gap_mean] == [0.0] * 4
    assert build_loss(AlgorithmConfig(loss="sft", kl_coef=0.1, kl_importance_weighted=True)).needs_old


def test_cispo_reports_the_ratio_before_its_clip() -> None:
    inputs = make_inputs()
    sums = build_loss(AlgorithmConfig(loss="cispo"))(inputs).sums
    ratios = (inputs.logprobs - inputs.old_logprobs).exp()[inputs.loss_mask]
    assert sums.ratio.item() == pytest.approx(ratios.sum().item())
    assert sums.clipped.item() == ((ratios < 0.8) | (ratios > 1.2)).sum().item() > 0


def test_on_policy_ratio_is_one_and_the_gradient_that_of_reinforce() -> None:
    inputs = make_inputs()
    inputs = replace(inputs, old_logprobs=inputs.logprobs.detach().clone())
    outputs = [build_loss(AlgorithmConfig(loss=name))(inputs) for name in ("ppo_clip", "policy_gradient", "cispo")]
    gradients = [torch.autograd.grad(o.loss, inputs.logprobs, retain_graph=True)[0] for o in outputs]
    assert torch.allclose(gradients[0], gradients[1]) and torch.allclose(gradients[2], gradients[1])
    assert outputs[0].sums.ratio == outputs[0].sums.num_tokens and outputs[0].sums.clipped == 0


def test_a_ratio_is_never_made_up(rejects: Rejects) -> None:
    inputs = replace(make_inputs(), old_logprobs=None)
    for name in ("ppo_clip", "gspo", "cispo"):
        loss = build_loss(AlgorithmConfig(loss=name))
        assert loss.needs_old
        with rejects(ValueError):
            loss(inputs)
    for name in ("policy_gradient", "sft"):
        assert not build_loss(AlgorithmConfig(loss=name)).needs_old


# ------------------------------------------------------------------------------------------------------------ KL
def policies(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of a policy, a reference and a sampling policy over 6 tokens: small enough for exact expectations."""
    g = torch.Generator().manual_seed(seed)
    policy, reference, sampler = (torch.randn(6, generator=g, dtype=torch.float64) for _ in range(3))
    return policy.requires_grad_(), reference, sampler


def expected_kl_gradient(settings: dict[str, object], on_policy: bool) -> tuple[Tensor, Tensor]:
    """Exact expectation over every token of the loss's KL gradient, and the gradient of KL(policy || reference)."""
    logits, reference, sampler = policies()
    log_policy, log_reference = logits.log_softmax(0), reference.log_softmax(0)
    log_sampler = log_policy.detach() if on_policy else sampler.log_softmax(0)
    zeros = torch.zeros(6, dtype=torch.float64)
    loss = build_loss(AlgorithmConfig(loss="policy_gradient", kl_coef=1.0, **settings))
    output = loss(
        LossInputs(
            logprobs=log_policy,
            entropy=None,
            old_logprobs=log_sampler,
            behaviour_logprobs=None,
            ref_logprobs=log_reference,
            advantages=zeros,
            loss_mask=torch.ones(6, dtype=torch.bool),
            token_weights=log_sampler.exp(),
        )
    )
    exact = (log_policy.exp() * (log_policy - log_reference)).sum()
    return tuple(torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (output.loss, exact))  # type: ignore[return-value]


EXACT = [
    ({"kl_estimator": "k2"}, True, True),
    ({"kl_estimator": "k3"}, True, False),
    ({"kl_estimator": "k2"}, False, False),
    ({"kl_estimator": "k1", "kl_importance_weighted": True}, True, True),
    ({"kl_estimator": "k3", "kl_importance_weighted": True}, True, True),
    ({"kl_estimator": "k1", "kl_importance_weighted": True}, False, True),
    ({"kl_estimator": "k3", "kl_importance_weighted": True}, False, True),
]


@pytest.mark.parametrize(("settings", "on_policy", "exact"), EXACT, ids=str)
def test_expected_kl_gradient(settings: dict[str, object], on_policy: bool, exact: bool) -> None:
    actual, reverse_kl = expected_kl_gradient(settings, on_policy)
    assert torch.allclose(actual, reverse_kl, atol=1e-12) == exact


def test_k1_has_no_expected_gradient_and_is_refused() -> None:
    logits, reference, _ = policies()
    log_policy = logits.log_softmax(0)
    value = (log_policy.detach().exp() * kl_estimate(log_policy, reference.log_softmax(0), "k1")).sum()
    assert torch.autograd.grad(value, logits)[0].abs().max() < 1e-15
    with pytest.raises(ValidationError, match="zero expected gradient"):
        AlgorithmConfig(kl_coef=0.1, kl_estimator="k1")


def test_unbiased_estimates_of_the_value(rejects: Rejects) -> None:
    logits, reference, _ = policies()
    p, log_p, log_q = logits.softmax(0), logits.log_softmax(0), reference.log_softmax(0)
    exact = torch.nn.functional.kl_div(log_q, log_p, log_target=True, reduction="sum")
    for estimator in ("k1", "k3"):
        assert (p * kl_estimate(log_p, log_q, estimator)).sum().item() == pytest.approx(exact.item(), rel=1e-12)
    with rejects(ValueError):
        kl_estimate(log_p, log_q, "k4")


def test_k3_keeps_precision_where_policies_agree() -> None:
    a = torch.full((1,), -1.0)
    assert kl_estimate(a, a + 1e-4, "k3").item() == pytest.approx(0.5e-8, rel=2e-2)


def test_parts_add_up() -> None:
    """loss = policy + kl_coef * KL - entropy_coef * entropy, and ``kl_loss`` is reported before its coefficient."""
    inputs = make_inputs()
    base = build_loss(AlgorithmConfig())(inputs)
    full = build_loss(AlgorithmConfig(kl_coef=0.3, kl_estimator="k2", entropy_coef=0.2))(inputs)
    weights = inputs.token_weights * inputs.loss_mask
    kl = (weights * 0.5 * (inputs.logprobs - inputs.ref_logprobs) ** 2).sum()
    entropy = (weights * inputs.entropy).sum()
    assert full.loss.item() == pytest.approx((base.loss + 0.3 * kl - 0.2 * entropy).item())
    assert full.sums.kl_loss.item() == pytest.approx(kl.item())
    assert full.sums.policy_loss.item() == pytest.approx(base.loss.item())
    assert torch.allclose(torch.autograd.grad(full.loss, inputs.entropy)[0], -0.2 * weights)


# ------------------------------------------------------------------------------------------- masks, sums, names, errors
@pytest.mark.parametrize("name", ["ppo_clip", "policy_gradient", "gspo", "cispo", "sft"])
def test_masked_tokens_have_no_effect(name: str) -> None:
    """Not even nan or inf, in the value, the gradient or a figure."""
    config = AlgorithmConfig(
        loss=name,
        kl_coef=0.1,
        kl_estimator="k2",
        entropy_coef=0.1,
        importance_correction="truncate",
        importance_level="sequence",
        off_policy_mask=0.1,
    )
    clean = make_inputs()
    dirty = {}
    for field, junk in zip(
        ("logprobs", "entropy", "old_logprobs", "behaviour_logprobs", "ref_logprobs", "advantages"),
        (float("nan"), float("inf"), float("-inf"), float("nan"), float("-inf"), 1e30),
        strict=True,
    ):
        value = getattr(clean, field).detach().masked_fill(~clean.loss_mask, junk)
        dirty[field] = value.requires_grad_() if field in ("logprobs", "entropy") else value
    results = []
    for inputs in (clean, replace(clean, **dirty)):
        output = build_loss(config)(inputs)
        results.append((output, torch.autograd.grad(output.loss, [inputs.logprobs, inputs.entropy])))
    (left, left_grads), (right, right_grads) = results
    assert left.loss == right.loss
    assert all(torch.equal(a, b) for a, b in zip(left_grads, right_grads, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(left.sums.to_vectors(), right.sums.to_vectors(), strict=True))


def test_a_fully_masked_micro_batch_keeps_its_graph() -> None:
    inputs = replace(make_inputs(), loss_mask=torch.zeros(TOTAL, dtype=torch.bool))
    for name in ("ppo_clip", "gspo", "sft"):
        output = build_loss(AlgorithmConfig(loss=name, kl_coef=0.1))(inputs)
        gradient = torch.autograd.grad(output.loss, inputs.logprobs)[0]
        assert output.loss == 0 and not gradient.any() and output.sums.num_tokens == 0
    empty = {f.name: None if f.name == "response_lens" else getattr(inputs, f.name)[:0] for f in fields(inputs)}
    assert build_loss(AlgorithmConfig())(LossInputs(**empty)).loss == 0


def test_sums_survive_the_vectors_and_add_up() -> None:
    config = AlgorithmConfig(kl_coef=0.1, importance_correction="mask")
    one, two = (build_loss(config)(make_inputs(seed)).sums for seed in (1, 2))
    assert LossSums.from_vectors(*one.to_vectors()) == one
    both = one.add(two)
    for field in fields(LossSums):
        a, b, c = (getattr(x, field.name).item() for x in (one, two, both))
        assert c == pytest.approx(max(a, b) if field.name.endswith("max") else a + b) and a != 0, field.name
    assert LossSums.zeros().add(one) == one
    assert all(vector.dtype == torch.float64 for vector in one.to_vectors())


def test_needs(rejects: Rejects) -> None:
    loss = build_loss(AlgorithmConfig(kl_coef=0.1, entropy_coef=0.1, importance_correction="truncate"))
    assert loss.name == "ppo_clip"
    assert loss.needs_reference and loss.needs_old and loss.needs_behaviour and loss.needs_entropy
    for missing in ("ref_logprobs", "old_logprobs", "behaviour_logprobs", "entropy", "advantages"):
        with rejects(ValueError):
            loss(replace(make_inputs(), **{missing: None}))


class Halved:
    """A user's own loss."""

    name, needs_old, needs_advantages = "halved", False, False

    def __init__(self, config: AlgorithmConfig) -> None:
        pass

    def __call__(self, inputs: LossInputs) -> PolicyTerms:
        return PolicyTerms(-0.5 * inputs.logprobs)


def test_loss_by_import_path_and_unknown_name(rejects: Rejects) -> None:
    inputs = make_inputs()
    custom, sft = (build_loss(AlgorithmConfig(loss=name))(inputs) for name in (f"{__name__}:Halved", "sft"))
    assert custom.loss.item() == pytest.approx(0.5 * sft.loss.item())
    with rejects(ValueError):
        build_loss(AlgorithmConfig(loss="ppo"))


def test_value_loss() -> None:
    """The clip keeps a value that moved far from being rewarded for it."""
    values = torch.tensor([1.0, 3.0, 0.0], dtype=torch.float64, requires_grad=True)
    old, returns = torch.zeros(3, dtype=torch.float64), torch.tensor([2.0, 2.0, 5.0], dtype=torch.float64)
    mask, weights = torch.tensor([True, True, False]), torch.tensor([0.5, 2.0, 9.0], dtype=torch.float64)
    plain = value_loss(values, old, returns, mask, weights)
    assert plain.loss.item() == pytest.approx(0.5 * (0.5 * 1 + 2.0 * 1))
    clipped = value_loss(values, old, returns, mask, weights, clip=0.5)
    assert clipped.loss.item() == pytest.approx(0.5 * (0.5 * 1.5**2 + 2.0 * 1.5**2))
    assert clipped.clipped.item() == 2
    assert not torch.autograd.grad(clipped.loss, values)[0].any()
    assert value_loss(values, old, returns, mask, weights, clip=9.0).clipped.item() == 0  # within reach: a draw
