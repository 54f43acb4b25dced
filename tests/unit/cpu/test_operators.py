"""The kernels against torch's own operators in float64, forward and backward."""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from numba import float32, njit, void
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

from slime_like.algorithms.head import fused_logprobs
from slime_like.cpu import parts
from slime_like.cpu.kernels import operators
from slime_like.cpu.kernels.elementary import exp
from slime_like.cpu.kernels.operators import (
    FusedAttention,
    FusedBranch,
    FusedLogitRows,
    FusedRMSNorm,
    FusedSum,
    FusedSwiGLU,
    are_served,
    is_served_width,
)
from tests.support.rejections import Rejects
from tests.unit.algorithms.cases import dense_scores

EPS = 1e-6


@njit([void(float32[::1], float32[::1])])
def _exponentials(x: np.ndarray, out: np.ndarray) -> None:
    for i in range(x.shape[0]):
        out[i] = exp(x[i])


def _exp(*values: float) -> np.ndarray:
    given = np.array(values, np.float32)
    out = np.empty_like(given)
    _exponentials(given, out)
    return out


def test_exponentials_are_right_to_two_units_in_the_last_place() -> None:
    given = np.linspace(-86.0, 87.0, 200_001, dtype=np.float32)
    wanted = np.exp(given.astype(np.float64))
    assert np.abs(_exp(*given) / wanted - 1).max() < 2 * 2**-23


def test_exponentials_at_the_ends() -> None:
    ends = _exp(-math.inf, -1e30, 0.0, 1e30, math.nan)
    assert (ends[:2] < 2e-38).all() and ends[2] == 1.0 and ends[3] > 1e38 and np.isnan(ends[4])


Computed = Callable[..., tuple[Tensor, ...]]


def _double(tensor: Tensor) -> Tensor:
    return tensor.detach().double().requires_grad_()


def _leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    """Standard normal ones, and as the last a norm's weight."""
    generator = torch.Generator().manual_seed(0)
    *inputs, weight = (torch.randn(shape, generator=generator) for shape in shapes)
    return [each.requires_grad_() for each in (*inputs, weight.sigmoid() + 0.5)]


def _normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(dim=-1, keepdim=True) + EPS).rsqrt() * weight


def _require_close(ours: tuple[Tensor, ...], wanted: tuple[Tensor, ...], bound: float = 3e-6) -> None:
    for one, other in zip(ours, wanted, strict=True):
        assert one.dtype == torch.float32 and one.shape == other.shape
        if not one.numel():
            continue
        gap, size = (float(x.detach().abs().max()) for x in (one - other, other))
        assert gap <= bound * size + 1e-6


def _require_same(ours: Computed, wanted: Computed, given: Sequence[Tensor], bound: float = 3e-6) -> None:
    """Results of ``ours`` and their gradients are those of ``wanted`` in float64, from the same leaves."""
    found, wide = ours(*given), tuple(map(_double, given))
    exact = wanted(*wide)
    _require_close(found, exact)
    generator = torch.Generator().manual_seed(1)
    grads = [torch.randn(out.shape, generator=generator) for out in found]
    wide_grads = [grad.double() for grad in grads]
    _require_close(torch.autograd.grad(found, given, grads), torch.autograd.grad(exact, wide, wide_grads), bound)


@pytest.mark.parametrize("shape", [(1, 8), (3, 1, 16), (200, 1, 128), (5, 2, 2, 33)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    given = _leaves(shape, shape[-1:])
    _require_same(lambda x, weight: (FusedRMSNorm.apply(x, weight, EPS),), lambda *wide: (_normed(*wide),), given)


@pytest.mark.parametrize("shape", [(0, 16), (1, 8), (200, 128), (70, 33)])
def test_what_goes_past_a_norm(shape: tuple[int, int]) -> None:
    given = _leaves(shape, shape[-1:])
    _require_same(lambda *ours: FusedBranch.apply(*ours, EPS), lambda x, weight: (x * 1, _normed(x, weight)), given)


@pytest.mark.parametrize("rows", [[], [3], [0, 2, 5, 99, 150], list(range(200))], ids=["none", "one", "some", "all"])
def test_a_sum_and_its_norm(rows: list[int]) -> None:
    index = torch.tensor(rows, dtype=torch.int64)
    _require_same(
        lambda one, other, weight: FusedSum.apply(one, other, index, weight, EPS),
        lambda one, other, weight: ((one + other)[rows], _normed((one + other)[rows], weight)),
        _leaves((200, 40), (200, 40), (40,)),
    )


def _every_operator(dtype: torch.dtype) -> list[Tensor]:
    """Results and gradients of all operators, on inputs that bfloat16 holds exactly."""
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).bfloat16().to(dtype).requires_grad_()

    x, y, weight, gate_up, mixed = leaf(130, 48), leaf(130, 48), leaf(48), leaf(130, 96), leaf(130, 2, 4 * 16)
    head, rows = leaf(70, 48), torch.arange(0, 130, 2)
    edges, alone = np.asarray([0, 40, 43, 43, 100, 130], dtype=np.int64), np.full(5, -1)
    shared = np.asarray([-1, 0, 1, 0, -1])
    angles = 6 * torch.rand(130, 8, generator=generator)
    norms, temperatures = (leaf(16), leaf(16)), torch.rand(130, generator=generator) + 0.5
    out = [
        FusedRMSNorm.apply(x, weight, EPS),
        *FusedBranch.apply(x, weight, EPS),
        *FusedSum.apply(x, y, rows, weight, EPS),
        FusedSwiGLU.apply(gate_up),
        FusedAttention.apply(mixed, *norms, EPS, angles.cos(), angles.sin(), edges, alone, 0.3),
        FusedAttention.apply(mixed * 1, *norms, EPS, angles.cos(), angles.sin(), edges, shared, 0.3),
        *fused_logprobs(x, head, torch.arange(130) % 70, temperatures, vocab_size=70, rows=FusedLogitRows()),
    ]
    grads = [torch.randn(each.shape, generator=generator).bfloat16().to(each.dtype) for each in out]
    return [*out, *torch.autograd.grad(out, (x, y, weight, gate_up, mixed, head, *norms), grads)]


def test_bfloat16_is_computed_in_float32_and_rounded_once() -> None:
    """But for logits, which are a product in bfloat16, and where gradients of bfloat16 add up."""
    for ours, wanted in zip(_every_operator(torch.bfloat16), _every_operator(torch.float32), strict=True):
        of_logits = ours.dim() == 1 and len(ours) == 130
        assert ours.dtype == (torch.float32 if of_logits else torch.bfloat16)
        assert float((ours.float() - wanted).norm()) < 1e-2 * float(wanted.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_change_no_row(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights' gradients are added up in another order."""
    alone = _every_operator(dtype)
    monkeypatch.setattr(parts, "_LEAST_ELEMENTS", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    called = []
    run_parts = parts.run_parts
    for module in (parts, operators):
        monkeypatch.setattr(module, "run_parts", lambda bounds, work: (called.append(bounds), run_parts(bounds, work)))
    together = _every_operator(dtype)
    assert max(len(bounds) for bounds in called) == 4 and min(len(bounds) for bounds in called) > 2
    for one, other in zip(alone, together, strict=True):
        if one.dim() == 1 and len(one) < 130:
            assert float((one - other).norm()) < (1e-5 if dtype == torch.float32 else 1e-2) * float(one.norm())
        else:
            assert torch.equal(one, other)


def test_a_failure_in_a_thread_is_raised() -> None:
    def work(start: int, end: int) -> None:
        if start == 2:
            raise ValueError("in the second part")

    with pytest.raises(ValueError, match="second part"):
        parts.run_parts([0, 2, 4], work)


def test_a_second_backward_over_what_the_first_has_overwritten_is_refused() -> None:
    case = Case([5, 9], 1, 2, 16, normed=True)
    for out in (FusedSwiGLU.apply(torch.randn(4, 6, requires_grad=True)), case.fused()):
        out.sum().backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@pytest.mark.parametrize("shape", [(1, 2), (3, 1, 32), (100, 1, 514), (0, 1, 8)])
def test_swiglu(shape: tuple[int, ...]) -> None:
    def wanted(gate_up: Tensor) -> tuple[Tensor]:
        gate, up = gate_up.chunk(2, dim=-1)
        return (silu(gate) * up,)

    gate_up = (4 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).requires_grad_()
    _require_same(lambda x: (FusedSwiGLU.apply(x),), wanted, [gate_up])


def _attention(
    mixed: Tensor, weights: tuple[Tensor, ...], cos: Tensor, sin: Tensor, boundaries: list[int], scale: float
) -> Tensor:
    """What ``FusedAttention`` computes, sequence by sequence, in torch."""
    dim = 2 * cos.shape[1]
    heads = mixed.unflatten(2, (-1, dim))
    queries, keys, values = heads[:, :, :-2], heads[:, :, -2:-1], heads[:, :, -1:]
    if weights:
        queries, keys = _normed(queries, weights[0]), _normed(keys, weights[1])

    def turned(x: Tensor) -> Tensor:
        one, other = x.chunk(2, dim=-1)
        c, s = cos[:, None, None], sin[:, None, None]
        return torch.cat((one * c - other * s, other * c + one * s), dim=-1)

    queries = turned(queries)
    keys, values = turned(keys).expand_as(queries), values.expand_as(queries)
    parts = [
        scaled_dot_product_attention(
            *(x[start:end].flatten(1, 2).transpose(0, 1)[None] for x in (queries, keys, values)),
            is_causal=True,
            scale=scale,
        )[0].transpose(0, 1)
        for start, end in pairwise(boundaries)
    ]
    return torch.cat(parts).flatten(1)


class Case:
    """Inputs of an attention, with angles that belong to no position."""

    def __init__(self, lengths: list[int], groups: int, heads: int, dim: int, normed: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        self.boundaries = np.cumsum([0, *lengths]).tolist()
        tokens = self.boundaries[-1]
        self.mixed = torch.randn(tokens, groups, (heads + 2) * dim, generator=generator).requires_grad_()
        norms = [(torch.rand(dim, generator=generator) + 0.5).requires_grad_() for _ in range(2)]
        self.weights = tuple(norms) if normed else ()
        angles = 6 * torch.rand(tokens, dim // 2, generator=generator)
        self.cos, self.sin = angles.cos(), angles.sin()
        self.scale = 1.3 * dim**-0.5

    def wanted(self, mixed: Tensor, *weights: Tensor) -> Tensor:
        return _attention(mixed, weights, self.cos.double(), self.sin.double(), self.boundaries, self.scale)

    def fused(self, mixed: Tensor | None = None, boundaries: list[int] | None = None) -> Tensor:
        mixed = self.mixed if mixed is None else mixed
        edges = np.asarray(self.boundaries if boundaries is None else boundaries)
        alone, weights = np.full(len(edges) - 1, -1), self.weights or (None, None)
        return FusedAttention.apply(mixed, *weights, EPS, self.cos, self.sin, edges, alone, self.scale)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(
    ("lengths", "groups", "heads", "dim"),
    [
        ([1], 1, 1, 16),
        ([5, 1, 16, 17, 2, 33], 2, 2, 32),
        ([15, 48, 31], 1, 3, 16),
        ([64, 3], 2, 1, 48),
        ([130, 7, 100], 1, 4, 128),
    ],
)
def test_attention(lengths: list[int], groups: int, heads: int, dim: int, normed: bool) -> None:
    case = Case(lengths, groups, heads, dim, normed)
    given = (case.mixed, *case.weights)
    _require_same(lambda *ours: (case.fused(),), lambda *wide: (case.wanted(*wide),), given, 1e-5)


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(
    ("lengths", "parents"),
    [
        ([5], [-1]),
        ([20, 7, 16, 1], [-1, 0, 0, 0]),
        ([0, 3, 0, 35, 2], [-1, 0, 0, 2, 2]),
        ([9, 17, 4, 30, 6, 21], [-1, 0, 1, 0, -1, 4]),
    ],
    ids=["one", "a prompt", "empty", "trees"],
)
def test_attention_behind_what_a_sequence_continues(lengths: list[int], parents: list[int], normed: bool) -> None:
    """Against whole sequences, each with a copy of all that it continues."""
    case = Case(lengths, 2, 3, 16, normed)
    paths: list[list[int]] = []
    for (start, end), parent in zip(pairwise(case.boundaries), parents, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else []), *range(start, end)])
    copied, ends = [token for path in paths for token in path], np.cumsum([0, *map(len, paths)]).tolist()
    own = [place for end, length in zip(ends[1:], lengths, strict=True) for place in range(end - length, end)]

    def ours(mixed: Tensor, *weights: Tensor) -> tuple[Tensor]:
        edges, norms = np.asarray(case.boundaries), weights or (None, None)
        # Backward overwrites what it was given.
        return (
            FusedAttention.apply(mixed * 1, *norms, EPS, case.cos, case.sin, edges, np.asarray(parents), case.scale),
        )

    def wanted(mixed: Tensor, *weights: Tensor) -> tuple[Tensor]:
        cos, sin = case.cos.double()[copied], case.sin.double()[copied]
        return (_attention(mixed[copied], weights, cos, sin, ends, case.scale)[own],)

    _require_same(ours, wanted, (case.mixed, *case.weights), 1e-5)


def test_large_scores_do_not_overflow() -> None:
    case = Case([40, 9], 1, 2, 16, normed=False)
    large = (30 * case.mixed).detach().requires_grad_()
    out = case.fused(large)
    wide = _double(large)
    wanted = case.wanted(wide)
    _require_close((out,), (wanted,), 1e-3)  # of scores of thousands, in float32
    grads = torch.autograd.grad(out.square().sum(), large), torch.autograd.grad(wanted.square().sum(), wide)
    _require_close(*grads, 2e-2)


def test_what_is_no_number_shows_in_its_sequence_behind_it_and_nowhere_else() -> None:
    case = Case([20, 23, 40], 2, 2, 16, normed=True)
    broken = case.mixed.detach().clone()
    broken[27, 1, 2 * 16 + 3] = math.nan  # a key of the second sequence's eighth token
    broken.requires_grad_()
    out = case.fused(broken)
    affected = torch.zeros(out.shape, dtype=torch.bool)
    affected[27:43, 2 * 16 :] = True
    assert torch.equal(out.isnan(), affected)
    (grad,) = torch.autograd.grad(out.nan_to_num().sum(), broken)
    (sound,) = torch.autograd.grad(case.fused().sum(), case.mixed)
    assert grad[20:43, 1].isnan().any() and not grad[:, 0].isnan().any()
    for part in (slice(0, 20), slice(43, None)):
        assert torch.equal(grad[part], sound[part])


def test_tokens_outside_of_the_boundaries_are_zeros() -> None:
    case = Case([10, 20, 6], 1, 2, 16, normed=True)
    out, whole = case.fused(boundaries=[10, 30]), case.fused()
    assert torch.equal(out[10:30], whole[10:30])
    assert not out[:10].any() and not out[30:].any()
    grad = torch.autograd.grad(out.square().sum(), case.mixed)[0]
    assert grad[10:30].any() and not grad[:10].any() and not grad[30:].any()


def test_what_is_served() -> None:
    assert are_served(torch.zeros(2, 3), torch.zeros(3))
    assert are_served(torch.zeros(2, 3), torch.zeros(3, dtype=torch.bfloat16))
    assert not are_served(torch.zeros(2, 3), torch.zeros(3, dtype=torch.float64))
    assert not are_served(torch.zeros(2, 3).t())
    assert not are_served(torch.zeros(3, device="meta"))
    assert [dim for dim in (8, 16, 24, 64, 80) if is_served_width(dim)] == [16, 64, 80]


@pytest.mark.parametrize("entropy_weight", [0.0, 0.7])
@pytest.mark.parametrize(("tokens", "vocabulary", "padding"), [(1, 1, 0), (70, 33, 5), (200, 264, 120), (3, 16, 0)])
def test_logprobs_and_entropies(tokens: int, vocabulary: int, padding: int, entropy_weight: float) -> None:
    torch.manual_seed(tokens)
    hidden, weight = 3 * torch.randn(tokens, 24), torch.randn(vocabulary + padding, 24)
    targets = torch.randint(vocabulary, (tokens,))
    temperatures, grad = torch.rand(tokens) + 0.5, torch.randn(tokens)
    hidden.requires_grad_(), weight.requires_grad_()
    wanted = [_double(hidden), _double(weight)]
    ours = fused_logprobs(
        hidden, weight, targets, temperatures, vocab_size=vocabulary, chunk_tokens=64, rows=FusedLogitRows()
    )
    theirs = dense_scores(wanted[0] @ wanted[1][:vocabulary].T / temperatures[:, None], targets)
    _require_close(ours, theirs, bound=2e-6)
    (grad * ours[0] + (entropy_weight * ours[1] if entropy_weight else 0)).sum().backward()
    (grad * theirs[0] + entropy_weight * theirs[1]).sum().backward()
    assert hidden.grad is not None and weight.grad is not None
    _require_close((hidden.grad, weight.grad), tuple(w.grad for w in wanted), bound=5e-6)  # type: ignore[misc]


def test_a_logit_that_is_no_number_is_not_hidden() -> None:
    hidden, weight = torch.randn(4, 8), torch.randn(20, 8)
    hidden[1, 3], hidden[2, 3] = torch.inf, torch.nan
    given = (hidden, weight, torch.arange(4), torch.ones(4))
    logprobs, entropy = fused_logprobs(*given, vocab_size=20, rows=FusedLogitRows())
    assert logprobs.isnan().tolist() == entropy.isnan().tolist() == [False, True, True, False]


def test_rows_of_other_kinds_are_refused(rejects: Rejects) -> None:
    hidden, weight, targets, ones = torch.randn(4, 8), torch.randn(20, 8), torch.arange(4), torch.ones(4)
    for dtype, softcap in ((torch.float64, None), (torch.float32, 2.0)):
        with rejects(ValueError):
            given = (hidden.to(dtype), weight.to(dtype), targets, ones)
            fused_logprobs(*given, vocab_size=20, softcap=softcap, rows=FusedLogitRows())
