"""Draws in one pass against draws by torch: at the same uniform numbers, the same tokens."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from rollout.transformers.drawing import draw_tokens_fused
from rollout.transformers.samples import Sample, draw_tokens
from slime_like.cpu.kernels import draw
from slime_like.interfaces import SamplingParams

_MANNERS = (
    SamplingParams(),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=1.7),
    SamplingParams(top_k=3),
    SamplingParams(temperature=0.8, top_p=0.7),
)


def _samples(manners: Sequence[SamplingParams], rows: int) -> list[Sample]:
    return [Sample([1], manners[row % len(manners)], frozenset(), random.Random(row)) for row in range(rows)]


@pytest.mark.parametrize("manners", [_MANNERS, _MANNERS[:4], _MANNERS[4:]], ids=["mixed", "whole", "truncated"])
@pytest.mark.parametrize("vocabulary", [3, 64, 264, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_tokens(dtype: torch.dtype, vocabulary: int, manners: Sequence[SamplingParams]) -> None:
    logits = 3 * torch.randn((300, vocabulary), generator=torch.Generator().manual_seed(vocabulary)).to(dtype)
    tokens, logprobs = draw_tokens_fused(logits, _samples(manners, 300))
    expected, expected_logprobs = draw_tokens(logits, _samples(manners, 300))
    assert tokens == expected
    np.testing.assert_allclose(logprobs, expected_logprobs, rtol=2e-6, atol=1e-6)


def _draw(logits: list[float], uniform: float) -> tuple[int, float]:
    tokens, logprobs = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.float32)
    row = np.array([logits], dtype=np.float32)
    draw.forward(row, np.ones(1, dtype=np.float32), np.array([uniform]), tokens, logprobs)
    return int(tokens[0]), float(logprobs[0])


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 1), (0.49, 1), (0.51, 130), (1 - 2**-53, 130)])
def test_what_has_no_probability_is_never_drawn(uniform: float, token: int) -> None:
    logits = [-np.inf] * 200
    logits[1] = logits[130] = 7.0
    drawn, logprob = _draw(logits, uniform)
    assert drawn == token
    assert logprob == pytest.approx(np.log(0.5))


def test_a_nan_stays_one() -> None:
    assert np.isnan(_draw([1.0, np.nan, 2.0], 0.5)[1])
    assert np.isnan(_draw([np.nan] * 100, 0.5)[1])
    assert np.isnan(_draw([1.0, np.inf, 2.0], 0.5)[1])
