"""Logprobs, entropies and the loss from logits against dense computations."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from slime_like.algorithms import (
    GRPOLoss,
    compute_response_logprobs,
    logprobs_and_entropy,
    pack_sequences,
    selective_log_softmax,
)
from slime_like.algorithms import logprobs as logprobs_module
from slime_like.config.algorithm import AlgorithmConfig
from slime_like.plugins.objective import LOSSES, STEP_LOSSES
from tests.support.properties import examples
from tests.unit.algorithms.cases import SHAPES, VOCABULARY, batch, close, dense_scores, options_of, shapes

TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-13}


def dense(logits: Tensor, targets: Tensor, temperatures: Tensor) -> tuple[Tensor, Tensor]:
    return dense_scores(logits.double() / temperatures[..., None], targets)


@pytest.fixture(params=[1, 300, 1 << 18], ids=["row", "few rows", "whole"])
def chunk_elements(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(logprobs_module, "_CPU_CHUNK_ELEMENTS", request.param)
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(13,), (3, 5), (1,)], ids=str)
def test_values_and_gradients(chunk_elements: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    logits = (4 * torch.randn(*shape, 101, dtype=torch.float64)).to(dtype).requires_grad_()
    targets = torch.randint(0, 101, shape)
    temperatures = torch.rand(shape) + 0.5
    weights = torch.randn(2, *shape, dtype=torch.float64)
    reference_logits = logits.detach().double().requires_grad_()
    expected = dense(reference_logits, targets, temperatures.double())
    actual = logprobs_and_entropy(logits, targets, temperatures)
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == dtype and close(a, e, TOLERANCE[dtype])
    sum((w * e).sum() for w, e in zip(weights, expected, strict=True)).backward()
    sum((w * a).sum() for w, a in zip(weights, actual, strict=True)).backward()
    assert close(logits.grad, reference_logits.grad, TOLERANCE[dtype])


def test_extreme_ignored_and_half_precision_logits() -> None:
    """Logits of 1e4 would overflow exp. A forbidden token (-inf) has probability 0 and logprob -inf."""
    logits = torch.tensor([[1e4, 1e4, 0.0], [-1e4, 0.0, 1e4], [float("-inf"), 0.0, 0.0]], dtype=torch.float64)
    actual = selective_log_softmax(logits, torch.tensor([0, 2, 1]))
    assert close(actual, torch.tensor([0.5, 1.0, 0.5]).double().log(), 1e-12)
    logits = torch.randn(4, 9, requires_grad=True)
    actual = selective_log_softmax(logits, torch.tensor([1, -100, 2, -1]))
    assert actual[1] == 0 and actual[3] == 0
    actual.sum().backward()
    assert logits.grad is not None and not logits.grad[[1, 3]].any() and logits.grad[[0, 2]].any()
    logits = (3 * torch.randn(5, 4000)).bfloat16()
    targets = torch.randint(0, 4000, (5,))
    actual = selective_log_softmax(logits, targets)
    assert actual.dtype == torch.float32 and close(actual, dense(logits, targets, torch.ones(5))[0], 2e-6)
    logits = torch.randn(2, 6, 50)
    before = logits.clone()
    targets = torch.randint(0, 50, (2, 6))
    actual = selective_log_softmax(logits, targets)
    logprobs_and_entropy(logits, targets)
    assert torch.equal(logits, before)
    assert close(actual, dense(logits, targets, torch.ones(2, 6))[0], 1e-6)


@given(shapes=shapes(12, 40), padding=st.integers(0, 9), temperature=st.sampled_from([None, 1.0, 0.6, 1.7]))
@examples(25)
def test_response_logprobs_of_each_sequence_alone(
    shapes: list[tuple[int, int]], padding: int, temperature: float | None
) -> None:
    """In every sequence, the logits at i score token i + 1, including the last response token."""
    sequences = batch(shapes)
    if temperature is not None:  # half of the sequences have it, the others the default
        sequences = [replace(s, temperature=(temperature, 1.0)[i % 2]) for i, s in enumerate(sequences)]
    total = sum(p + r for p, r in shapes)
    packed = pack_sequences(sequences, target_tokens_per_batch=total + padding)
    logits = torch.randn(total + padding, VOCABULARY, dtype=torch.float64, requires_grad=True)
    expected, start = [], 0
    for s in sequences:
        tokens = torch.cat([s.prompt_tokens, s.response_tokens])
        scores = (logits[start : start + s.total_len] / (temperature or s.temperature)).log_softmax(-1)
        for i in range(s.prompt_len, s.total_len):
            expected.append(scores[i - 1, tokens[i]])
        start += s.total_len
    actual = compute_response_logprobs(logits, packed, temperature)
    assert close(actual, torch.stack(expected), 1e-13)
    weights = torch.randn(len(expected), dtype=torch.float64)
    reference = torch.autograd.grad((torch.stack(expected) * weights).sum(), logits)[0]
    assert close(torch.autograd.grad((actual * weights).sum(), logits)[0], reference, 1e-13)


def test_another_temperature_than_the_sampling_one_is_rejected() -> None:
    """A sequence at temperature 1, the default, accepts any."""
    sampled = [replace(s, temperature=0.7 if i == 2 else 1.0) for i, s in enumerate(batch(SHAPES))]
    packed = pack_sequences(sampled)
    logits = torch.randn(30, VOCABULARY)
    for arguments in ((), (1.0,), (0.9,)):
        with pytest.raises(ValueError, match="was sampled at temperature"):
            compute_response_logprobs(logits, packed, *arguments)
    parts = compute_response_logprobs(logits, packed, None).split(packed.response_lens.tolist())
    everywhere = compute_response_logprobs(logits, packed, 0.7).split(packed.response_lens.tolist())
    assert torch.equal(parts[2], everywhere[2]) and not torch.equal(parts[1], everywhere[1])


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
