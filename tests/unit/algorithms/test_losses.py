"""Losses against their published formulas, token by token in Python, and gradients against autograd of the formula."""

import math
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from slime_like.algorithms import LossInputs, LossSums, build_loss, kl_estimate, value_loss
from slime_like.config.algorithm import AlgorithmConfig

LENGTHS = [5, 1, 8]
TOTAL = sum(LENGTHS)


def make_inputs(seed: int = 0, distance: float = 0.5) -> LossInputs:
    """Make three sequences, whose policies differ by about ``distance`` nats per token."""
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
        divergence=torch.rand(TOTAL, generator=g, dtype=torch.float64).requires_grad_(),
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
    (
        {"loss": {"name": "ppo_clip", "clip_low": 0.1, "clip_high": 0.4}},
        lambda lp, old, a: ppo(math.exp(lp - old), a, 0.1, 0.4),
    ),
    ({"loss": {"name": "ppo_clip", "dual_clip": 1.5}}, lambda lp, old, a: ppo(math.exp(lp - old), a, dual=1.5)),
    ({"loss": "policy_gradient"}, lambda lp, old, a: -a * lp),
    ({"loss": {"name": "cispo", "clip_high": 0.3}}, lambda lp, old, a: -clip(math.exp(lp - old), 0.8, 1.3) * a * lp),
    ({"loss": {"name": "cispo", "clip_low": 1.0}}, lambda lp, old, a: -clip(math.exp(lp - old), 0.0, 1.2) * a * lp),
    ({"loss": "sft"}, lambda lp, old, a: -lp),
]


@pytest.mark.parametrize(("settings", "formula"), TOKEN_FORMULAS, ids=[str(s) for s, _ in TOKEN_FORMULAS])
def test_token_losses(settings, formula) -> None:  # type: ignore[no-untyped-def]
    inputs = make_inputs()
    output = build_loss(AlgorithmConfig(**settings))(inputs)
    columns = (inputs.logprobs, inputs.old_logprobs, inputs.advantages, inputs.loss_mask, inputs.token_weights)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    expected = sum(w * formula(lp, old, a) for lp, old, a, kept, w in rows if kept)
    assert output.loss.item() == pytest.approx(expected, rel=1e-12)
    assert output.sums.policy_loss.item() == pytest.approx(expected, rel=1e-12)


def test_gspo() -> None:
    """Each sequence has one ratio, over its loss-carrying tokens, clipped as a whole."""
    inputs = make_inputs(distance=0.3)
    output = build_loss(AlgorithmConfig(loss={"name": "gspo", "clip_low": 0.05, "clip_high": 0.1}))(inputs)
    expected, ratios = torch.zeros((), dtype=torch.float64), []
    columns = (inputs.loss_mask, inputs.logprobs - inputs.old_logprobs, inputs.advantages, inputs.token_weights)
    for kept, difference, a, weights in zip(*(column.split(LENGTHS) for column in columns), strict=True):
        ratio = difference[kept].mean().exp() if kept.any() else torch.ones(())
        loss = -torch.minimum(ratio * a, ratio.clamp(0.95, 1.1) * a)
        expected = expected + (loss * weights * kept).sum()
        ratios += [ratio.item()] * int(kept.sum())
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
    reported = (stats.num_tokens.item(), stats.grad_norm.item(), stats.learning_rate.item())
    assert reported == (kept.sum().item(), 1.5, 1e-3)


# Settings, and the function from ratios and advantages to clipped tokens.
CLIPPED = [
    (
        {"loss": {"name": "ppo_clip", "dual_clip": 1.5}},
        lambda r, a: ((r > 1.2) & (a > 0)) | ((r < 0.8) & (a < 0)) | (r > 1.5),
    ),
    ({"loss": "cispo"}, lambda r, a: (r < 0.8) | (r > 1.2)),
    ({"loss": "policy_gradient"}, lambda r, a: torch.zeros(len(r))),
]


@pytest.mark.parametrize(("settings", "clipped"), CLIPPED, ids=[str(s) for s, _ in CLIPPED])
def test_figures_of_each_loss(settings, clipped) -> None:  # type: ignore[no-untyped-def]
    """The dual clip counts as a clip. The ratio is reported unclipped, even for a loss without one."""
    inputs = make_inputs()
    inputs, kept = replace(inputs, advantages=-inputs.advantages.abs()), inputs.loss_mask
    loss = build_loss(AlgorithmConfig(**settings))
    ratios, sums = (inputs.logprobs - inputs.old_logprobs).exp()[kept], loss(inputs).sums
    assert sums.ratio.item() == pytest.approx(ratios.sum().item()) and (ratios > 1.5).any()
    assert sums.clipped.item() == clipped(ratios, inputs.advantages[kept]).sum().item()
    stats = loss(replace(inputs, loss_mask=torch.zeros(TOTAL, dtype=torch.bool))).sums.to_stats(1.0, 0.0, 0.0)
    assert [stats.ratios, stats.entropy, stats.clipfrac, stats.engine_gap_mean] == [0.0] * 4


# ------------------------------------------------------------------------------------------------------------ KL
EXACT = [
    ({"estimator": "k2"}, True, True),
    ({"estimator": "k3"}, True, False),
    ({"estimator": "k2"}, False, False),
    ({"estimator": "k1", "importance_weighted": True}, True, True),
    ({"estimator": "k3", "importance_weighted": True}, True, True),
    ({"estimator": "k1", "importance_weighted": True}, False, True),
    ({"estimator": "k3", "importance_weighted": True}, False, True),
]


@pytest.mark.parametrize(("kl", "on_policy", "exact"), EXACT, ids=str)
def test_expected_kl_gradient(kl: dict[str, Any], on_policy: bool, exact: bool) -> None:
    """Compare the expectation over all 6 tokens with the gradient of KL(policy || reference)."""
    g = torch.Generator().manual_seed(0)
    logits, reference, sampler = (torch.randn(6, generator=g, dtype=torch.float64).requires_grad_() for _ in range(3))
    log_policy, log_reference = logits.log_softmax(0), reference.log_softmax(0).detach()
    log_sampler = (logits if on_policy else sampler).log_softmax(0).detach()
    inputs = LossInputs(
        log_policy,
        torch.ones(6) > 0,
        log_sampler.exp(),
        old_logprobs=log_sampler,
        ref_logprobs=log_reference,
        advantages=torch.zeros(6),
    )
    loss = build_loss(AlgorithmConfig(loss="policy_gradient", kl={"coef": 1.0, **kl}))(inputs).loss
    reverse_kl = (log_policy.exp() * (log_policy - log_reference)).sum()
    gradients = [torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (loss, reverse_kl)]
    assert torch.allclose(*gradients, atol=1e-12) == exact


def test_k1_without_importance_weights_is_rejected() -> None:
    with pytest.raises(ValidationError, match="zero expected gradient"):
        AlgorithmConfig(kl={"coef": 0.1, "estimator": "k1"})


def test_k3_keeps_precision_where_policies_agree() -> None:
    a = torch.full((1,), -1.0)
    assert kl_estimate(a, a + 1e-4, "k3").item() == pytest.approx(0.5e-8, rel=2e-2)


def test_low_var_kl_is_k3_up_to_ten() -> None:
    d = torch.tensor([-1.0, 0.5, -2.5, -2.4, 50.0], dtype=torch.float64, requires_grad=True)
    estimate = kl_estimate(d, torch.zeros(5, dtype=torch.float64), "low_var_kl")
    values = [math.exp(-x) - 1 + x for x in d.tolist()]
    assert max(values[:4]) < 10 < math.exp(3) - 1 - 3
    assert estimate.tolist() == pytest.approx([*values[:4], 10.0])
    further = torch.tensor([-3.0], dtype=torch.float64, requires_grad=True)
    bounded = kl_estimate(further, torch.zeros(1), "low_var_kl")
    assert bounded.item() == 10 and torch.autograd.grad(bounded.sum(), further)[0] == 0
    assert torch.autograd.grad(estimate[2], d)[0][2].item() == pytest.approx(1 - math.exp(2.5))


def fourth_power(difference: Tensor) -> Tensor:
    return difference**4


def mean_power(difference: Tensor) -> Tensor:
    return (difference**4).mean()


def test_a_custom_kl_estimator() -> None:
    inputs, here = make_inputs(), "tests.unit.algorithms.test_losses"
    sums = build_loss(AlgorithmConfig(kl={"coef": 0.3, "estimator": f"{here}:fourth_power"}))(inputs).sums
    kl = inputs.token_weights * inputs.loss_mask * (inputs.logprobs - inputs.ref_logprobs) ** 4
    assert sums.kl_loss.item() == pytest.approx(kl.sum().item())
    with pytest.raises(ValueError, match=r"unit\.algorithms\.test_losses:mean_power"):
        build_loss(AlgorithmConfig(kl={"coef": 0.3, "estimator": f"{here}:mean_power"}))(inputs)


def test_parts_are_reported_without_their_coefficients() -> None:
    inputs = make_inputs()
    sums = build_loss(AlgorithmConfig(kl={"coef": 0.3, "estimator": "k2"}, entropy_coef=0.2))(inputs).sums
    kl = inputs.token_weights * inputs.loss_mask * 0.5 * (inputs.logprobs - inputs.ref_logprobs) ** 2
    assert sums.kl_loss.item() == pytest.approx(kl.sum().item())
    assert sums.policy_loss.item() == pytest.approx(build_loss(AlgorithmConfig())(inputs).loss.item())


# ------------------------------------------------------------------------------------------- masks, sums, names, errors
@pytest.mark.parametrize("name", ["ppo_clip", "policy_gradient", "gspo", "cispo", "sft"])
def test_masked_tokens_have_no_effect(name: str) -> None:
    """Not even nan or inf affect the value, the gradient or a metric."""
    correction = {"importance": {"correction": "truncate", "level": "sequence"}, "off_policy_mask": 0.1}
    config = AlgorithmConfig(loss=name, kl={"coef": 0.1, "estimator": "k2"}, entropy_coef=0.1, **correction)
    clean, results = make_inputs(), []
    junk = {"logprobs": math.nan, "entropy": math.inf, "old_logprobs": -math.inf, "behaviour_logprobs": math.nan}
    junk |= {"ref_logprobs": -math.inf, "advantages": 1e30, "token_weights": math.nan}
    dirty = {field: getattr(clean, field).detach().masked_fill(~clean.loss_mask, x) for field, x in junk.items()}
    dirty["logprobs"].requires_grad_(), dirty["entropy"].requires_grad_()
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
        output = build_loss(AlgorithmConfig(loss=name, kl={"coef": 0.1}))(inputs)
        gradient = torch.autograd.grad(output.loss, inputs.logprobs)[0]
        assert output.loss == 0 and not gradient.any() and output.sums.num_tokens == 0
    absent = ("response_lens", "set_apart")
    empty = {f.name: getattr(inputs, f.name)[:0] for f in fields(inputs) if f.name not in absent}
    assert build_loss(AlgorithmConfig())(LossInputs(**empty)).loss == 0


def test_sums_survive_the_vectors_and_add_up() -> None:
    terms = {"kl": {"coef": 0.1}, "importance": {"correction": "mask"}}
    made = []
    for seed, bound in ((1, 130.0), (2, 60.0)):  # each rejects one sequence
        config = AlgorithmConfig(**terms, rejection={"estimator": "k2", "bound": bound})
        made.append(build_loss(config)(make_inputs(seed, distance=15.0)).sums)
    one, two = made
    assert LossSums.from_vectors(*one.to_vectors()) == one
    both = one.add(two)
    for field in fields(LossSums):
        a, b, c = (getattr(x, field.name).item() for x in (one, two, both))
        assert c == pytest.approx(max(a, b) if field.name.endswith("max") else a + b) and a != 0, field.name
    assert LossSums.zeros().add(one) == one
    assert all(vector.dtype == torch.float64 for vector in one.to_vectors())


def test_the_exact_kl_to_a_teacher_has_the_weights_of_the_policy_loss() -> None:
    """Values on tokens without loss have no effect."""
    inputs = make_inputs()
    odd = torch.where(inputs.loss_mask, inputs.divergence.detach(), torch.inf).requires_grad_()
    plain, taught = (build_loss(AlgorithmConfig(), part) for part in (0.0, 0.7))
    output = taught(replace(inputs, divergence=odd))
    pairs = zip(inputs.divergence.tolist(), inputs.loss_mask.tolist(), inputs.token_weights.tolist(), strict=True)
    expected = [(value, weight) for value, carries, weight in pairs if carries]
    added = 0.7 * sum(value * weight for value, weight in expected)
    assert float(output.loss - plain(inputs).loss) == pytest.approx(added, rel=1e-12)
    assert float(output.sums.divergence) == pytest.approx(sum(value for value, _ in expected), rel=1e-12)
    gradient = torch.autograd.grad(output.loss, odd)[0]
    torch.testing.assert_close(gradient, 0.7 * torch.where(inputs.loss_mask, inputs.token_weights, 0.0))
    with pytest.raises(ValueError, match="needs divergence, but"):
        taught(replace(inputs, divergence=None))


def test_needs() -> None:
    """Missing inputs are not replaced."""
    terms = {"kl": {"coef": 0.1}, "entropy_coef": 0.1, "importance": {"correction": "truncate"}}
    for name in ("ppo_clip", "gspo", "cispo"):
        loss = build_loss(AlgorithmConfig(loss=name, **terms))
        assert loss.name == name
        assert loss.needs_reference and loss.needs_old and loss.needs_behaviour and loss.needs_entropy
        for missing in ("ref_logprobs", "old_logprobs", "behaviour_logprobs", "entropy", "advantages"):
            with pytest.raises(ValueError, match=f"needs {missing}, but"):
                loss(replace(make_inputs(), **{missing: None}))
    for name in ("policy_gradient", "sft"):
        assert not build_loss(AlgorithmConfig(loss=name)).needs_old
    assert build_loss(AlgorithmConfig(loss="sft", kl={"coef": 0.1, "importance_weighted": True})).needs_old


def test_value_loss() -> None:
    """With the clip, a value that moves far doesn't lower the loss."""
    values = torch.tensor([1.0, 3.0, 0.0], dtype=torch.float64, requires_grad=True)
    old, returns = torch.zeros(3, dtype=torch.float64), torch.tensor([2.0, 2.0, 5.0], dtype=torch.float64)
    mask, weights = torch.tensor([True, True, False]), torch.tensor([0.5, 2.0, 9.0], dtype=torch.float64)
    plain, _ = value_loss(values, old, returns, mask, weights)
    assert plain.item() == pytest.approx(0.5 * (0.5 * 1 + 2.0 * 1))
    clipped, sums = value_loss(values, old, returns, mask, weights, clip=0.5)
    assert clipped.item() == pytest.approx(0.5 * (0.5 * 1.5**2 + 2.0 * 1.5**2))
    assert sums.clipped.item() == 2
    assert not torch.autograd.grad(clipped, values)[0].any()
    assert value_loss(values, old, returns, mask, weights, clip=9.0)[1].clipped.item() == 0  # a tie within the bound


def test_a_masked_value_has_no_effect() -> None:
    """NaN in any of the four tensors affects neither loss nor gradient."""
    mask = torch.tensor([True, False, True])
    clean = torch.tensor([[0.5, 0.7, -0.3], [0.1, 0.2, 0.3], [1.0, 2.0, 3.0], [1.0, 1.0, 1.0]])
    dirty = clean.masked_fill(~mask, float("nan")).requires_grad_()
    expected, found = (value_loss(*rows[:3], mask, rows[3], clip=0.2) for rows in (clean, dirty))
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1].clipped, expected[1].clipped)
    (gradient,) = torch.autograd.grad(found[0], dirty)
    assert bool(torch.isfinite(gradient[0]).all()) and gradient[0, 1] == 0


def test_changes_of_values_within_the_clip_are_not_counted_as_clipped() -> None:
    """In float32, an old value plus a change is often not the new value."""
    values, old, returns = torch.randn(3, 4096, generator=torch.Generator().manual_seed(0)).tanh() * 0.14
    assert bool((old + (values - old) != values).any())
    mask, weights = torch.ones(4096, dtype=torch.bool), torch.ones(4096)
    assert value_loss(values, old, returns, mask, weights, clip=0.3)[1].clipped.item() == 0


def test_metrics_of_a_step_of_values() -> None:
    """Sums of two micro-batches give the metrics of both together; masked tokens and empty packs count nothing."""
    g = torch.Generator().manual_seed(0)
    values, old, returns, weights = (torch.randn(40, generator=g, dtype=torch.float64) for _ in range(4))
    mask = torch.rand(40, generator=g) < 0.7
    parts = [slice(0, 15), slice(15, 15), slice(15, 40)]
    rows = values, old, returns, mask, weights
    losses, sums = zip(*(value_loss(*(each[part] for each in rows), clip=0.2) for part in parts), strict=True)
    stats = sums[0].add(sums[1]).add(sums[2]).to_stats(4.0, 1.5, 0.1)
    error, moved = (returns - values)[mask], (values - old)[mask]
    wanted = {
        "loss": sum(loss.item() for loss in losses) / 4,
        "explained_variance": 1 - error.var(correction=0).item() / returns[mask].var(correction=0).item(),
        "values": values[mask].mean().item(),
        "returns": returns[mask].mean().item(),
        "clipfrac": sum(each.clipped.item() for each in sums) / int(mask.sum()),
        "old_gap_max": moved.abs().max().item(),
        "grad_norm": 1.5,
        "learning_rate": 0.1,
        "num_tokens": int(mask.sum()),
    }
    assert {name: float(getattr(stats, name)) for name in wanted} == pytest.approx(wanted)


def test_equal_returns_have_no_variance_to_explain() -> None:
    mask, weights = torch.ones(9, dtype=torch.bool), torch.ones(9)
    sums = value_loss(torch.randn(9), torch.zeros(9), torch.full((9,), 0.1), mask, weights)[1]
    assert float(sums.to_stats(1.0, 0.0, 0.0).explained_variance) == 0.0
