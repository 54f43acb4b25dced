"""Draws of tokens: by chunks of rows, by the whole batch, and by a plain computation."""

import numpy as np
import pytest
import torch
from torch import Tensor

from rollout.drawing import Limits, draw, uniforms

ROWS, VOCABULARY = 37, 1003


@pytest.fixture(scope="module")
def logprobs() -> Tensor:
    logits = 4 * torch.randn((ROWS, VOCABULARY), generator=torch.Generator().manual_seed(0))
    return logits.log_softmax(-1)


@pytest.fixture(scope="module")
def numbers() -> Tensor:
    found = uniforms(torch.arange(ROWS) * 1_000_003, torch.arange(ROWS))
    found[0], found[1] = 0.0, 1 - 2**-53
    return found


@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 36, 37])
def test_chunks_draw_the_same_as_the_whole_batch(logprobs: Tensor, numbers: Tensor, truncated: bool, rows: int) -> None:
    """A chunk has at least one row."""
    top_ks, top_ps = torch.arange(1, ROWS + 1), torch.linspace(0.2, 1.0, ROWS)
    limits = Limits(top_ks, top_ps, torch.linspace(0.0, 0.3, ROWS)) if truncated else None
    whole = draw(logprobs, numbers, limits)
    assert torch.equal(draw(logprobs, numbers, limits, chunk_bytes=rows * VOCABULARY * 8 + 7), whole)
    assert torch.equal(draw(logprobs, numbers, limits, chunk_bytes=1), whole)


def test_draw_inverts_the_cumulative_distribution(logprobs: Tensor, numbers: Tensor) -> None:
    cumulative = np.exp(logprobs.numpy().astype(np.float64)).cumsum(axis=1)
    wanted = [
        int(np.searchsorted(row, min(u * row[-1], np.nextafter(row[-1], 0)), side="right"))
        for row, u in zip(cumulative, numbers.tolist(), strict=True)
    ]
    assert draw(logprobs, numbers, None, chunk_bytes=5 * VOCABULARY * 8).tolist() == wanted


def test_logprobs_over_supports(logprobs: Tensor, numbers: Tensor) -> None:
    """Only rows that ask for it change. The tokens are the same."""
    limits = Limits(torch.full((ROWS,), 40), torch.full((ROWS,), 0.9), torch.full((ROWS,), 0.02))
    supported, given = torch.arange(ROWS) % 3 > 0, logprobs.clone()
    tokens = draw(given, numbers, limits, supported, chunk_bytes=5 * VOCABULARY * 8)
    assert torch.equal(tokens, draw(logprobs, numbers, limits))
    assert torch.equal(given[~supported], logprobs[~supported])
    for row in supported.nonzero()[:, 0].tolist():
        ordered = np.sort(np.exp(logprobs[row].double().numpy()))[::-1]
        ordered = ordered[ordered >= 0.02 * ordered[0]][:40]
        count = int((np.cumsum(ordered) - ordered < 0.9 * ordered.sum()).sum())
        found = given[row].exp()
        assert found[tokens[row]] > 0 and int((found > 0).sum()) == count
        assert found.sum().item() == pytest.approx(1.0, abs=1e-5)
        np.testing.assert_allclose(np.sort(found)[::-1][:count], ordered[:count] / ordered[:count].sum(), rtol=1e-4)


def test_temporaries_are_bounded_by_the_chunk(logprobs: Tensor, numbers: Tensor) -> None:
    """There is no float64 tensor of the whole batch."""
    largest: list[int] = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = function(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and result.dtype == torch.float64:
                largest.append(result.nbytes)
            return result

    with Watch():
        draw(logprobs, numbers, None, chunk_bytes=4 * VOCABULARY * 8)
    assert max(largest) == 4 * VOCABULARY * 8
