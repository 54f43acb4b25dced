"""Losses against their published formulas, token by token in Python, and gradients against autograd of the formula."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from slime_like.algorithms import LossInputs, LossSums, PolicyTerms, build_loss, kl_estimate, pack_sequences, required
from slime_like.config.algorithm import AlgorithmConfig
from tests.unit.algorithms.cases import scored

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


Formula = Callable[[float, float, float], float]


def clip(x: float, low: float, high: float) -> float:
    return max(low, min(high, x))


# ------------------------------------------------------------------------------------------- formulas, token by token
def ppo(ratio: float, a: float, low: float = 0.2, high: float = 0.2, dual: float | None = None) -> float:
    objective = min(ratio * a, clip(ratio, 1 - low, 1 + high) * a)
    if dual is not None and a < 0:
        objective = max(objective, dual * a)
    return -objective


def cispo(low: float, high: float) -> tuple[Formula, Formula]:
    """Return value and derivative by the token's logprob: the weight is a constant."""

    def slope(lp: float, old: float, a: float) -> float:
        return -clip(math.exp(lp - old), 1 - low, 1 + high) * a

    return (lambda lp, old, a: slope(lp, old, a) * lp), slope


def sapo(lp: float, old: float, a: float) -> float:
    tau = 1.0 if a > 0 else 1.05
    return -4 / tau / (1 + math.exp(-tau * (math.exp(lp - old) - 1))) * a


def dppo(divergence: Callable[[float, float], float], bound: float) -> tuple[Formula, Formula]:
    """Return value and derivative, as for CISPO."""

    def slope(lp: float, old: float, a: float) -> float:
        p, q = math.exp(old), math.exp(lp)
        away = q > p if a > 0 else q < p
        return 0.0 if away and divergence(p, q) > bound else -min(q / p, 1.5) * a

    return (lambda lp, old, a: slope(lp, old, a) * lp), slope


def binary_kl(p: float, q: float) -> float:
    return p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))


# The loss, its formula, and the derivative if the formula has a weight without gradient.
TOKEN_LOSSES: list[tuple[Any, Formula, Formula | None]] = [
    ("ppo_clip", lambda lp, old, a: ppo(math.exp(lp - old), a), None),
    (
        {"name": "ppo_clip", "clip_low": 0.1, "clip_high": 0.4},
        lambda lp, old, a: ppo(math.exp(lp - old), a, 0.1, 0.4),
        None,
    ),
    ({"name": "ppo_clip", "dual_clip": 1.5}, lambda lp, old, a: ppo(math.exp(lp - old), a, dual=1.5), None),
    ("policy_gradient", lambda lp, old, a: -a * lp, None),
    ({"name": "cispo", "clip_high": 0.3}, *cispo(0.2, 0.3)),
    ({"name": "cispo", "clip_low": 1.0}, *cispo(1.0, 0.2)),
    ("sft", lambda lp, old, a: -lp, None),
    ("sapo", sapo, None),
    ({"name": "dro", "beta": 0.3}, lambda lp, old, a: -a * lp + 0.15 * (lp - old) ** 2, None),
    ({"name": "dppo_tv", "low": 0.1, "high": 0.1, "ratio_cap": 1.5}, *dppo(lambda p, q: abs(p - q), 0.1)),
    ({"name": "dppo_kl", "low": 0.03, "high": 0.03, "ratio_cap": 1.5}, *dppo(binary_kl, 0.03)),
]


@pytest.mark.parametrize(("loss", "formula", "slope"), TOKEN_LOSSES, ids=[str(case[0]) for case in TOKEN_LOSSES])
def test_token_losses(loss: Any, formula: Formula, slope: Formula | None) -> None:
    inputs = make_inputs()
    inputs.logprobs = inputs.logprobs.detach().clamp_max(-0.01).requires_grad_()  # probabilities
    output = build_loss(AlgorithmConfig(loss=loss))(inputs)
    columns = (inputs.logprobs, inputs.old_logprobs, inputs.advantages, inputs.loss_mask, inputs.token_weights)
    rows = list(zip(*(column.tolist() for column in columns), strict=True))
    expected = sum(w * formula(lp, old, a) for lp, old, a, kept, w in rows if kept)
    assert output.loss.item() == pytest.approx(expected, rel=1e-12)
    assert output.sums.policy_loss.item() == pytest.approx(expected, rel=1e-12)
    (gradient,) = torch.autograd.grad(output.loss, inputs.logprobs)
    step = 1e-6
    for found, (lp, old, a, kept, w) in zip(gradient.tolist(), rows, strict=True):
        by_difference = (formula(lp + step, old, a) - formula(lp - step, old, a)) / (2 * step)
        derivative = by_difference if slope is None else slope(lp, old, a)
        assert found == pytest.approx(w * derivative if kept else 0.0, rel=1e-7, abs=1e-9)


def gspo(logs: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    ratio = logs.mean().exp()
    return ratio, -torch.minimum(ratio * a, ratio.clamp(0.95, 1.1) * a)


def gmpo(logs: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the published pseudocode, with the sign of the advantage."""
    sign = a.sign()
    ratio = (sign * torch.minimum(sign * logs, sign * logs.clamp(-0.2, 0.3))).mean().exp()
    return ratio, -a * ratio


@pytest.mark.parametrize(("formula", "low", "high"), [(gspo, 0.05, 0.1), (gmpo, 0.2, 0.3)])
def test_sequence_losses(formula: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], low: float, high: float) -> None:
    """The loss-carrying tokens of a sequence have one ratio and one loss, functions of their log ratios."""
    inputs = make_inputs(distance=0.3)
    config = AlgorithmConfig(loss={"name": formula.__name__, "clip_low": low, "clip_high": high})
    output, expected, ratios = build_loss(config)(inputs), torch.zeros((), dtype=torch.float64), 0.0
    columns = (inputs.loss_mask, inputs.logprobs - inputs.old_logprobs, inputs.advantages, inputs.token_weights)
    for kept, logs, a, weights in zip(*(column.split(LENGTHS) for column in columns), strict=True):
        if kept.any():
            ratio, loss = formula(logs[kept], a[0])
            expected, ratios = expected + loss * weights[kept].sum(), ratios + ratio.item() * int(kept.sum())
    assert output.loss.item() == pytest.approx(expected.item(), rel=1e-12)
    gradients = [torch.autograd.grad(x, inputs.logprobs, retain_graph=True)[0] for x in (output.loss, expected)]
    assert torch.allclose(*gradients, rtol=1e-11, atol=1e-13)
    assert output.sums.ratio.item() == pytest.approx(ratios)


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
    assert loss(replace(inputs, advantages=0 * inputs.advantages)).sums.clipped == 0  # without a gradient to take


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


def test_k3_is_precise_and_low_var_kl_bounded() -> None:
    a = torch.full((1,), -1.0)
    assert kl_estimate(a, a + 1e-4, "k3").item() == pytest.approx(0.5e-8, rel=2e-2)
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
    """Parts are reported without their coefficients."""
    inputs, here = make_inputs(), "tests.unit.algorithms.test_losses"
    config = AlgorithmConfig(kl={"coef": 0.3, "estimator": f"{here}:fourth_power"}, entropy_coef=0.2)
    sums = build_loss(config)(inputs).sums
    kl = inputs.token_weights * inputs.loss_mask * (inputs.logprobs - inputs.ref_logprobs) ** 4
    assert sums.kl_loss.item() == pytest.approx(kl.sum().item())
    assert sums.policy_loss.item() == pytest.approx(build_loss(AlgorithmConfig())(inputs).loss.item())
    with pytest.raises(ValueError, match=r"unit\.algorithms\.test_losses:mean_power"):
        build_loss(AlgorithmConfig(kl={"coef": 0.3, "estimator": f"{here}:mean_power"}))(inputs)


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
    absent = ("response_lens", "mean_weights", "fields")
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


@dataclass(frozen=True)
class Scaled:
    """A loss that reads a field of the pack that no built-in loss reads."""

    name: ClassVar[str] = "scaled"
    needs_old: ClassVar[bool] = False
    needs_advantages: ClassVar[bool] = False

    def __call__(self, inputs: LossInputs) -> PolicyTerms:
        return PolicyTerms(-required(inputs, "returns") * inputs.logprobs)


def test_a_loss_reads_any_field_of_the_pack() -> None:
    """Values on tokens without loss have no effect. A missing field and another shape are rejected."""
    row = scored(0)
    returns = torch.arange(4.0).masked_fill(~row.loss_mask, math.nan)
    pack = pack_sequences([replace(row, returns=torch.arange(4.0))])
    loss = build_loss(AlgorithmConfig(loss="tests.unit.algorithms.test_losses:Scaled"))
    logprobs = torch.full((4,), -2.0, dtype=torch.float64, requires_grad=True)
    inputs = loss.inputs(pack, logprobs, torch.zeros(4))
    output = loss(replace(inputs, fields={**inputs.fields, "returns": returns}))
    expected = row.token_weight * torch.arange(4.0)[row.loss_mask].double()
    assert output.loss.item() == pytest.approx(2 * expected.sum().item())
    assert torch.autograd.grad(output.loss, logprobs)[0][row.loss_mask].tolist() == pytest.approx((-expected).tolist())
    for given in ({}, {"returns": returns[:1]}):
        with pytest.raises(ValueError, match="returns"):
            loss(replace(inputs, fields=given))
