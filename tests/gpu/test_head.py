"""The head with its kernels on a CUDA device agrees with whole logits in float64 on the same device."""

from functools import partial

import pytest
import torch
from torch import Tensor

from slime_like.algorithms.head import Head, fused_logprobs, fused_reverse_kl, row_kernels
from tests.parallel.dense import relative_error
from tests.unit.algorithms.test_head import run_sharded, weighted

pytestmark = pytest.mark.gpu

TOKENS, WIDTH, VOCABULARY = 300, 2560, 151_936
BOUND = 1e-2  # by norm; gradients are rounded to bfloat16
SCORE_BOUND = 1e-4  # nats; equal inputs, float32 products


def _case(width: int, vocabulary: int) -> dict[str, Tensor]:
    g = torch.Generator(device="cuda").manual_seed(0)
    noise = partial(torch.randn, generator=g, device="cuda")
    return {
        "hidden": noise(TOKENS, width).bfloat16(),
        "weight": noise(vocabulary, width).mul_(3 * width**-0.5).bfloat16(),
        "targets": torch.randint(0, vocabulary, (TOKENS,), generator=g, device="cuda"),
        "temperatures": torch.rand(TOKENS, generator=g, device="cuda") + 0.5,
        "w": noise(TOKENS),
        "h": noise(TOKENS) / 10,
    }


def _supports(case: dict[str, Tensor], vocabulary: int) -> Tensor:
    """Return the whole vocabulary for every third token, and the target with some others for the rest."""
    others = torch.randint(0, vocabulary, (TOKENS, 7), device="cuda")
    supports = torch.cat([case["targets"][:, None], others], 1).int()
    supports[::3] = -1
    return supports


def _dense(case: dict[str, Tensor], supports: Tensor | None, softcap: float | None) -> list[Tensor]:
    leaves = [case[name].double().requires_grad_() for name in ("hidden", "weight")]
    logits = leaves[0] @ leaves[1].t()
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    logits = logits / case["temperatures"].double()[:, None]
    if supports is not None:
        allowed = torch.ones_like(logits, dtype=torch.bool)
        for row, tokens in zip(allowed, supports.long(), strict=True):
            if tokens[0] >= 0:
                row[:] = False
                row[tokens] = True
        logits = logits.masked_fill(~allowed, -1e30)
    logs = logits.log_softmax(1)
    scores = logs.gather(1, case["targets"][:, None]).squeeze(1), -(logs.exp() * logs).sum(1)
    weighted(case, scores).backward()
    return [*(score.detach() for score in scores), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def _assert_equal(found: list[Tensor], expected: list[Tensor]) -> None:
    assert row_kernels(found[0].device) == "triton"
    for ours, exact in zip(found[:2], expected[:2], strict=True):
        assert float((ours - exact).abs().max()) < SCORE_BOUND
    for ours, exact in zip(found[2:], expected[2:], strict=True):
        assert relative_error(ours, exact) < BOUND


@pytest.mark.parametrize(
    ("supported", "softcap", "vocabulary", "width"),
    [
        (False, None, VOCABULARY, WIDTH),
        (True, None, VOCABULARY, WIDTH),
        (True, 3.0, 5003, 256),
        (False, 3.0, 5003, 256),
    ],
)
def test_head_in_bfloat16_is_that_of_whole_logits(
    supported: bool, softcap: float | None, vocabulary: int, width: int
) -> None:
    """In several chunks, so that the weight's gradient is summed."""
    case = _case(width, vocabulary)
    supports = _supports(case, vocabulary) if supported else None
    leaves = [case[name].clone().requires_grad_() for name in ("hidden", "weight")]
    options = {"vocab_size": vocabulary, "chunk_tokens": 128, "supports": supports, "softcap": softcap}
    scores = fused_logprobs(*leaves, case["targets"], case["temperatures"], **options)
    weighted(case, scores).backward()
    found = [*(score.detach() for score in scores), *(leaf.grad for leaf in leaves if leaf.grad is not None)]
    _assert_equal(found, _dense(case, supports, softcap))


def test_two_halves_of_the_vocabulary_give_the_whole() -> None:
    case = _case(512, 32_000)
    halves = run_sharded(
        case,
        fused_logprobs,
        lambda part: [case["hidden"], case["weight"][part]],
        2,
        vocab_size=32_000,
        chunk_tokens=128,
    )
    expected = _dense(case, None, None)
    for logprobs, entropy, of_hidden, _ in halves:
        _assert_equal([logprobs, entropy, of_hidden], expected[:3])
    assert relative_error(torch.cat([half[3] for half in halves]), expected[3]) < BOUND


def test_the_exact_divergence_is_that_of_whole_logits() -> None:
    """Of a teacher that is narrower than the student."""
    student, teacher = (_case(width, VOCABULARY) for width in (WIDTH, 1024))
    exact = [student[name].double().requires_grad_() for name in ("hidden", "weight")]
    logits = exact[0] @ exact[1].t(), teacher["hidden"].double() @ teacher["weight"].double().t()
    p, q = ((each / student["temperatures"].double()[:, None]).log_softmax(1) for each in logits)
    expected = (p.exp() * (p - q)).sum(1)
    leaves = [student[name].clone().requires_grad_() for name in ("hidden", "weight")]
    heads = Head(*leaves, student["temperatures"]), Head(teacher["hidden"], teacher["weight"], student["temperatures"])
    found = fused_reverse_kl(*heads, vocab_size=VOCABULARY, chunk_tokens=128)
    assert float((found.detach() - expected.detach()).abs().max()) < SCORE_BOUND * 10
    gradients = torch.autograd.grad(found, leaves, student["w"])
    wanted = torch.autograd.grad(expected, exact, student["w"].double())
    assert max(map(relative_error, gradients, wanted)) < BOUND
