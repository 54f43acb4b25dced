"""Packed gated delta nets compute every sequence as if it were alone."""

from itertools import accumulate, pairwise

import torch
from torch import Tensor

from backends.common.linear_attention import Boundaries, Recurrence, causal_conv, gated_delta_net

LENGTHS = (3, 64, 1, 130, 65, 2, 63)
"""Shorter than the convolution; one token from the end of a chunk; several chunks."""
GROUPS, HEADS, KEY, VALUE, WIDTH = 2, 4, 8, 6, 4


BOUNDARIES = Boundaries.of(torch.tensor([0, *accumulate(LENGTHS)], dtype=torch.int32))


def _inputs() -> list[Tensor]:
    generator, tokens = torch.Generator().manual_seed(0), sum(LENGTHS)
    shapes = (tokens, GROUPS, KEY), (tokens, GROUPS, KEY), (tokens, HEADS, VALUE), (tokens, HEADS), (tokens, HEADS)
    q, k, v, g, beta = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [x.requires_grad_() for x in (q, k, v, -g.exp(), beta.sigmoid())]


def _token_by_token(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Compute equation 10 of arXiv:2412.06464 as it is written, for one sequence."""
    q, k = (torch.nn.functional.normalize(x, dim=-1).repeat_interleave(HEADS // GROUPS, dim=1) for x in (q, k))
    states, found = torch.zeros(HEADS, KEY, VALUE, dtype=v.dtype), []
    decay, rate = g.exp()[..., None, None], beta[..., None, None]
    for t in range(len(q)):
        forget = torch.eye(KEY, dtype=v.dtype) - rate[t] * k[t, :, :, None] * k[t, :, None, :]
        states = decay[t] * forget @ states + rate[t] * k[t, :, :, None] * v[t, :, None, :]
        found.append((states.mT @ q[t, :, :, None] / KEY**0.5)[..., 0])
    return torch.stack(found)


def test_values_and_gradients_are_those_of_the_recurrence_of_each_sequence() -> None:
    inputs = _inputs()
    found = gated_delta_net(*inputs, BOUNDARIES)
    ends = pairwise([0, *accumulate(LENGTHS)])
    expected = torch.cat([_token_by_token(*(x[start:end] for x in inputs)) for start, end in ends])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)  # of the norms' epsilon
    grad = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=found.dtype)
    for one, other in zip(*(torch.autograd.grad(out, inputs, grad) for out in (found, expected)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_the_convolution_begins_anew_in_every_sequence() -> None:
    x, weight = (torch.randn(n, 5, dtype=torch.float64) for n in (sum(LENGTHS), WIDTH))
    found = causal_conv(x, weight.T, BOUNDARIES)
    starts = torch.tensor([0, *accumulate(LENGTHS)][:-1]).repeat_interleave(torch.tensor(LENGTHS))
    for t, start in enumerate(starts.tolist()):
        seen = x[max(start, t - WIDTH + 1) : t + 1]
        torch.testing.assert_close(found[t], (seen * weight[WIDTH - len(seen) :]).sum(0))


def _mixed(seed: int) -> tuple[Tensor, ...]:
    """Return outputs and input gradients of a pack whose second sequence depends on the seed."""
    generator = torch.Generator().manual_seed(7)
    q, k, v, a, b = (x.detach().bfloat16() for x in _inputs())
    other = slice(LENGTHS[0], LENGTHS[0] + LENGTHS[1])
    for x in (q, k, v, a, b):
        x[other] = torch.randn(x[other].shape, generator=torch.Generator().manual_seed(seed))
    conv = torch.randn(2 * GROUPS * KEY + HEADS * VALUE, WIDTH, generator=generator).bfloat16()
    parameters = (conv, *(torch.randn(HEADS, generator=generator).bfloat16() for _ in range(2)))
    inputs = [x.requires_grad_() for x in (q, k, v, a, b)]
    same = torch.arange(len(q))
    out = Recurrence(BOUNDARIES, same, same, None).mix(*inputs, *parameters)
    kept = torch.ones(len(q), dtype=torch.bool)
    kept[other] = False
    grads = torch.autograd.grad(out.float().square().sum(), inputs)
    return tuple(x[kept] for x in (out, *grads))


def test_a_neighbor_changes_no_bit() -> None:
    for one, other in zip(_mixed(0), _mixed(1), strict=True):
        assert torch.equal(one, other)
