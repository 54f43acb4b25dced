"""Packed gated delta nets compute every sequence as if it were alone."""

from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Qwen3_5TextConfig, Qwen3NextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from backends.common import linear_attention
from backends.common.linear_attention import Boundaries, causal_conv, gated_delta_net

LENGTHS = (3, 64, 1, 130, 65, 2, 63)
"""Shorter than the convolution; one token from the end of a chunk; several chunks."""
GROUPS, HEADS, KEY, VALUE, WIDTH = 2, 4, 8, 6, 4


def _boundaries(lengths: tuple[int, ...] = LENGTHS) -> Boundaries:
    return Boundaries.of(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32))


def _inputs(tokens: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (tokens, GROUPS, KEY), (tokens, GROUPS, KEY), (tokens, HEADS, VALUE), (tokens, HEADS), (tokens, HEADS)
    q, k, v, g, beta = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [x.to(dtype).requires_grad_() for x in (q, k, v, -g.exp(), beta.sigmoid())]


def _token_by_token(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """Compute equation 10 of arXiv:2412.06464 as it is written, for one sequence."""
    q, k = (torch.nn.functional.normalize(x, dim=-1).repeat_interleave(HEADS // GROUPS, dim=1) for x in (q, k))
    states, found = [torch.zeros(KEY, VALUE, dtype=v.dtype) for _ in range(HEADS)], []
    for t in range(len(q)):
        row = []
        for h in range(HEADS):
            forget = torch.eye(KEY, dtype=v.dtype) - beta[t, h] * torch.outer(k[t, h], k[t, h])
            states[h] = g[t, h].exp() * forget @ states[h] + beta[t, h] * torch.outer(k[t, h], v[t, h])
            row.append(states[h].T @ q[t, h] / KEY**0.5)
        found.append(torch.stack(row))
    return torch.stack(found)


def test_values_and_gradients_are_those_of_the_recurrence_of_each_sequence() -> None:
    inputs = _inputs(sum(LENGTHS))
    found = gated_delta_net(*inputs, _boundaries())
    ends = pairwise([0, *accumulate(LENGTHS)])
    expected = torch.cat([_token_by_token(*(x[start:end] for x in inputs)) for start, end in ends])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)  # of the norms' epsilon
    grad = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=found.dtype)
    for one, other in zip(*(torch.autograd.grad(out, inputs, grad) for out in (found, expected)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_the_convolution_begins_anew_in_every_sequence() -> None:
    x, weight = (torch.randn(n, 5, dtype=torch.float64) for n in (sum(LENGTHS), WIDTH))
    found = causal_conv(x, weight.T, _boundaries())
    starts = torch.tensor([0, *accumulate(LENGTHS)][:-1]).repeat_interleave(torch.tensor(LENGTHS))
    for t, start in enumerate(starts.tolist()):
        seen = x[max(start, t - WIDTH + 1) : t + 1]
        torch.testing.assert_close(found[t], (seen * weight[WIDTH - len(seen) :]).sum(0))


def _mixed(recurrence: Any, seed: int) -> tuple[Tensor, ...]:
    """Return outputs and input gradients of a pack whose second sequence depends on the seed."""
    generator = torch.Generator().manual_seed(7)
    q, k, v, a, b = (x.detach().bfloat16() for x in _inputs(sum(LENGTHS)))
    other = slice(LENGTHS[0], LENGTHS[0] + LENGTHS[1])
    for x in (q, k, v, a, b):
        x[other] = torch.randn(x[other].shape, generator=torch.Generator().manual_seed(seed))
    conv = torch.randn(2 * GROUPS * KEY + HEADS * VALUE, WIDTH, generator=generator).bfloat16()
    parameters = (conv, *(torch.randn(HEADS, generator=generator).bfloat16() for _ in range(2)))
    inputs = [x.requires_grad_() for x in (q, k, v, a, b)]
    out = recurrence.mix(*inputs, *parameters)
    kept = torch.ones(len(q), dtype=torch.bool)
    kept[other] = False
    grads = torch.autograd.grad(out.float().square().sum(), inputs)
    return tuple(x[kept] for x in (out, *grads))


def _alone(lengths: tuple[int, ...] = LENGTHS) -> linear_attention.Recurrence:
    boundaries, same = _boundaries(lengths), torch.arange(sum(lengths))
    return linear_attention.Recurrence(boundaries, same, same, None)


def test_a_neighbor_changes_no_bit() -> None:
    for one, other in zip(_mixed(_alone(), 0), _mixed(_alone(), 1), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kind", [Qwen3NextGatedDeltaNet, Qwen3_5GatedDeltaNet])
def test_the_parts_between_projections_are_those_of_transformers(kind: Any) -> None:
    """transformers computes one sequence at a time, its states in float32."""
    config = (Qwen3NextConfig if kind is Qwen3NextGatedDeltaNet else Qwen3_5TextConfig)(
        hidden_size=16, linear_num_key_heads=GROUPS, linear_num_value_heads=HEADS,
        linear_key_head_dim=KEY, linear_value_head_dim=VALUE, num_hidden_layers=2,
    )  # fmt: skip
    torch.manual_seed(0)
    layer = kind(config, 0).double()
    hidden = torch.randn(1, sum(LENGTHS), 16, dtype=torch.float64)
    expected = torch.cat([layer(part) for part in hidden.split(LENGTHS, dim=1)], dim=1)
    if kind is Qwen3NextGatedDeltaNet:
        mixed = layer.in_proj_qkvz(hidden), layer.in_proj_ba(hidden)
        q, k, v, z, b, a = (x[0] for x in layer.fix_query_key_value_ordering(*mixed))
    else:
        q, k, v = (x.unflatten(1, (-1, size)) for x, size in zip(
            layer.in_proj_qkv(hidden)[0].split([GROUPS * KEY, GROUPS * KEY, HEADS * VALUE], dim=1),
            (KEY, KEY, VALUE), strict=True,
        ))  # fmt: skip
        z, b, a = (project(hidden)[0] for project in (layer.in_proj_z, layer.in_proj_b, layer.in_proj_a))
    out = _alone().mix(q, k, v, a, b, layer.conv1d.weight[:, 0], layer.A_log, layer.dt_bias)
    found = layer.out_proj(layer.norm(out.flatten(0, 1), z.reshape(-1, VALUE)).view(1, sum(LENGTHS), -1))
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-6)
    names, parameters = zip(*layer.named_parameters(), strict=True)
    grad = torch.randn(found.shape, dtype=found.dtype)
    gradients = [torch.autograd.grad(x, parameters, grad) for x in (found, expected)]
    for name, one, other in zip(names, *gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
