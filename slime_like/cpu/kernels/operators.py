"""The kernels as differentiable operators of torch, in a CPU's memory.

They compute in float32, in as many threads as torch has. Of bfloat16 tensors they read and write copies.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime_like.cpu.kernels import logit_rows, packed_attention, rms_norm, swiglu
from slime_like.cpu.kernels.tile import LANES
from slime_like.cpu.parts import in_parts, num_parts, run_parts

_BLOCK_ELEMENTS = 2**20
"""Of bfloat16 that are copied at once: the float32 copies stay in a processor's cache."""
_PER_TOKEN = 256
"""Keys that cost as much as what is done to a token once in packed attention."""


SERVED = (torch.float32, torch.bfloat16)


def are_served(*tensors: Tensor) -> bool:
    """Return whether the kernels support such tensors; torch's operators handle all others."""
    return all(t.dtype in SERVED and t.device.type == "cpu" and t.is_contiguous() for t in tensors)


def is_served_width(head_dim: int) -> bool:
    """Return whether ``FusedAttention`` supports this head size."""
    return head_dim % LANES == 0


class FusedRMSNorm(torch.autograd.Function):
    """(..., H) by (H,) weights; see ``rms_norm.forward``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out, rstd = _normed(x.detach().view(-1, x.shape[-1]), weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        rows = _array(x.view(-1, x.shape[-1]))
        grad, scale, factors = _array(grads[0].contiguous().view(rows.shape)), _array(weight), rstd.numpy()
        x_grad = torch.empty(rows.shape)

        def part(start: int, end: int, weight_grad: np.ndarray) -> None:
            given = (each[start:end] for each in (grad, rows))
            rms_norm.backward(*given, scale, factors[start:end], _array(x_grad)[start:end], weight_grad)

        weight_grad = _summed_over_parts(rows.shape, part)
        return x_grad.to(x.dtype).view(x.shape), weight_grad.to(weight.dtype), None


class FusedBranch(torch.autograd.Function):
    """(T, H) by (H,) weights to itself and its norm: a residual and what is computed beside it.

    Backward both gradients are one, in one pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        out, rstd = _normed(x, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return x, out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        x_grad, weight_grad = _residual_gradients(grads, x, torch.arange(len(x)), weight, rstd, len(x))
        return x_grad, weight_grad, None


class FusedSum(torch.autograd.Function):
    """Two (T, H), ``rows`` (n,) of T that are wanted, none twice, and (H,) weights, to (n, H): the sum, and its norm.

    See ``rms_norm.sum_forward``.
    """

    @staticmethod
    def forward(
        ctx: Any, added: Tensor, residual: Tensor, rows: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        left, right, scale = map(_array, (added, residual, weight))
        total, rstd = torch.empty(len(rows), added.shape[1]), torch.empty(len(rows))
        out = torch.empty_like(total)

        def part(start: int, end: int) -> None:
            written = (each.numpy()[start:end] for each in (total, out, rstd))
            rms_norm.sum_forward(left, right, rows.numpy()[start:end], scale, eps, *written)

        in_parts(total.shape, part)
        total, out = total.to(added.dtype), out.to(added.dtype)
        ctx.tokens = len(added)
        ctx.save_for_backward(total, rows, weight, rstd)
        return total, out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        total, rows, weight, rstd = ctx.saved_tensors
        x_grad, weight_grad = _residual_gradients(grads, total, rows, weight, rstd, ctx.tokens)
        return x_grad, x_grad, None, weight_grad, None


def _residual_gradients(
    grads: Sequence[Tensor], total: Tensor, rows: Tensor, weight: Tensor, rstd: Tensor, tokens: int
) -> tuple[Tensor, Tensor]:
    """Of (``tokens``, H) whose ``rows`` are ``total``, and of the norm's weight.

    Args:
        grads: of ``total`` past its norm, and of what is normalised.
    """
    carried, grad, normed = (_array(each.contiguous()) for each in (*grads, total))
    shape = (tokens, total.shape[1])
    total_grad = torch.empty(shape) if len(rows) == tokens else torch.zeros(shape)
    scale = _array(weight)

    def part(start: int, end: int, weight_grad: np.ndarray) -> None:
        given = (each[start:end] for each in (grad, carried, normed, rows.numpy()))
        rms_norm.sum_backward(*given, scale, rstd.numpy()[start:end], total_grad.numpy(), weight_grad)

    weight_grad = _summed_over_parts(normed.shape, part)
    return total_grad.to(total.dtype), weight_grad.to(weight.dtype)


def _normed(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(T, H) to its norm and (T,) scales."""
    rows, scale = _array(x), _array(weight)
    out, rstd = torch.empty(x.shape), torch.empty(len(x))

    def part(start: int, end: int) -> None:
        rms_norm.forward(rows[start:end], scale, eps, out.numpy()[start:end], rstd.numpy()[start:end])

    in_parts(x.shape, part)
    return out.to(x.dtype), rstd


def _summed_over_parts(shape: Sequence[int], part: Callable[[int, int, np.ndarray], None]) -> Tensor:
    """Sum of what each part of the rows of ``shape`` writes, one row, in the order of parts."""
    rows, width = shape
    parts = num_parts(rows * width)
    sums = {rows * index // parts: np.empty(width, np.float32) for index in range(parts)}
    run_parts([*sums, rows], lambda start, end: part(start, end, sums[start]))
    return torch.from_numpy(sum(list(sums.values())[1:], start=sums[0]))


class FusedSwiGLU(torch.autograd.Function):
    """(..., 2 F), gates before ups, to (..., F); see ``swiglu.forward``. Backward overwrites what it was given."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        width = gate_up.shape[-1]
        out = gate_up.new_empty(*gate_up.shape[:-1], width // 2)
        for given, place in _blocks(gate_up.view(-1, width), out.view(-1, width // 2)):
            rows, written = _array(given), place.new_empty(place.shape, dtype=torch.float32)
            _swiglu(swiglu.forward, rows, written.numpy())
            place.copy_(written)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate_up_grad = _reused(gate_up)
        width = gate_up.shape[-1]
        grad = grads[0].contiguous().view(-1, width // 2)
        for given, place in _blocks(grad, gate_up_grad.view(-1, width)):
            changed = place.float()
            _swiglu(swiglu.backward, _array(given), changed.numpy())
            if changed is not place:
                place.copy_(changed)
        return gate_up_grad


def _swiglu(kernel: Callable[[np.ndarray, np.ndarray], None], given: np.ndarray, written: np.ndarray) -> None:
    in_parts(written.shape, lambda start, end: kernel(given[start:end], written[start:end]))


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Rows of all, a block at a time; those of float32 at once."""
    first = tensors[0].detach()
    rows = len(first) if first.dtype == torch.float32 else max(1, _BLOCK_ELEMENTS // first.shape[-1])
    return zip(*(tensor.detach().split(max(1, rows)) for tensor in tensors), strict=True)


class FusedAttention(torch.autograd.Function):
    """Autograd function of ``packed_attention.forward``.

    Arguments: mixed (T, G, (R + 2) * D); the weights (D,) of the norms of queries and keys, or None for both; their
    eps; cos and sin (T, D / 2); (S + 1,) int64 boundaries of segments and (S,) those that they continue, -1 for none;
    the scale of products.

    Returns (T, G * R * D), zeros outside of the boundaries. Backward overwrites ``mixed``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        mixed: Tensor,
        query_weight: Tensor | None,
        key_weight: Tensor | None,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        boundaries: np.ndarray,
        parents: np.ndarray,
        scale: float,
    ) -> Tensor:
        tokens, groups, width = mixed.shape
        dim = 2 * cos.shape[1]
        out = _empty_or_zeros(boundaries, (tokens, groups, width - 2 * dim))
        lse = torch.empty(out.shape[1] * out.shape[2] // dim, tokens)
        ctx.setting = (eps, boundaries, parents, scale)
        wide, *given = _given(mixed, (query_weight, key_weight), (cos, sin), ctx.setting)

        def part(first: int, last: int) -> None:
            segments = _segments(boundaries, parents, first, last)
            packed_attention.forward(wide, *segments, *given, out.numpy(), lse.numpy())

        run_parts(_shares(boundaries, parents, mixed[0].numel()), part)
        out = out.to(mixed.dtype)
        ctx.save_for_backward(mixed, query_weight, key_weight, cos, sin, out, lse)
        return out.view(tokens, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        mixed, query_weight, key_weight, cos, sin, out, lse = ctx.saved_tensors
        _, boundaries, parents, _ = ctx.setting
        grad, mixed_grad = _array(grads[0].contiguous().view(out.shape)), _reused(mixed).float()
        wide, *given = _given(mixed_grad, (query_weight, key_weight), (cos, sin), ctx.setting)
        shares = _shares(boundaries, parents, mixed[0].numel())
        sums = {first: (np.empty_like(given[0]), np.empty_like(given[1])) for first in shares[:-1]}
        results = (_array(out), lse.numpy())

        def part(first: int, last: int) -> None:
            segments = _segments(boundaries, parents, first, last)
            packed_attention.backward(grad, wide, *segments, *given, *results, *sums[first])

        run_parts(shares, part)
        mixed_grad[: boundaries[0]] = mixed_grad[boundaries[-1] :] = 0.0
        of_norms: tuple[Tensor | None, ...] = (None, None)
        if query_weight is not None:
            of_norms = tuple(
                torch.from_numpy(sum(parts)).to(query_weight.dtype) for parts in zip(*sums.values(), strict=True)
            )
        return mixed_grad.to(mixed.dtype), *of_norms, None, None, None, None, None, None


def _segments(boundaries: np.ndarray, parents: np.ndarray, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
    """Boundaries and parents of some neighbours, which continue no others."""
    return boundaries[first : last + 1], parents[first:last] - first


def _shares(boundaries: np.ndarray, parents: np.ndarray, width: int) -> list[int]:
    """Bounds of runs of whole trees for threads: work grows with tokens and with the square of lengths."""
    lengths = np.diff(boundaries)
    roots = np.append(np.flatnonzero(parents < 0), len(parents))
    parts = num_parts(int(lengths.sum()) * width)
    work = np.concatenate([[0], np.cumsum(lengths * (lengths + _PER_TOKEN))])[roots]
    inner = roots[np.searchsorted(work, work[-1] * np.arange(1, parts) / parts)]
    return sorted({0, *inner.tolist(), len(lengths)})


class FusedLogitRows:
    """Logits of the head as ``logit_rows`` computes them, in place of torch's operators."""

    def sums(self, products: Tensor, temperatures: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """(n,) maxima of ``products / temperatures``, (n, V), and (3, n) sums as those of ``row_sums``."""
        maximum, sums = torch.empty(len(products)), torch.empty(len(products), 3)

        def part(start: int, end: int) -> None:
            written = np.empty((3, end - start), np.float32)
            logit_rows.forward(*(each[start:end] for each in arrays), written)
            totals[start:end] = written.T

        for block in _blocks(products, temperatures, columns, maximum, sums):
            *arrays, totals = (_array(each) if each.is_floating_point() else each.numpy() for each in block)
            in_parts(block[0].shape, part)
        return maximum, sums.t().contiguous()

    def to_gradient(
        self,
        products: Tensor,
        temperatures: Tensor,
        columns: Tensor,
        softmax: tuple[Tensor, Tensor, Tensor],
        grads: tuple[Tensor, Tensor, Tensor | None],
    ) -> Tensor:
        """``products`` become their gradient, and are returned; the rest is as ``logit_gradient`` takes it."""
        of_entropy = torch.zeros_like(grads[0]) if grads[2] is None else grads[2]

        def part(start: int, end: int) -> None:
            logit_rows.backward(*(each[start:end] for each in arrays))

        for block in _blocks(products, temperatures, columns, *softmax, *grads[:2], of_entropy):
            gradient, *values = (each.float() if each.is_floating_point() else each for each in block)
            arrays = [each.contiguous().numpy() for each in (gradient, *values)]
            in_parts(gradient.shape, part)
            if gradient is not block[0]:
                block[0].copy_(gradient)
        return products


def _given(
    mixed: Tensor, weights: tuple[Tensor | None, ...], turns: tuple[Tensor, ...], setting: tuple[Any, ...]
) -> tuple[Any, ...]:
    """The kernels' first arguments, but for boundaries."""
    eps, *_, scale = setting
    norms = (np.empty(0, np.float32) if weight is None else _array(weight) for weight in weights)
    return _array(mixed), *norms, eps, *map(_array, turns), scale


def _reused(saved: Tensor) -> Tensor:
    """Reuse the memory of a saved tensor for its gradient, which is as large.

    It lies in the processor's cache then, where new memory would have to be fetched only to be overwritten. torch
    rejects later reads through autograd, such as a second backward.
    """
    torch.autograd.graph.increment_version(saved)
    return saved.detach()


def _empty_or_zeros(boundaries: np.ndarray, shape: Sequence[int]) -> Tensor:
    """Zeros where there are tokens outside of the boundaries, which the kernels leave alone."""
    whole = boundaries[0] == 0 and boundaries[-1] == shape[0]
    return torch.empty(shape) if whole else torch.zeros(shape)


def _array(tensor: Tensor) -> np.ndarray:
    """In float32: the tensor's memory, or of another type a copy."""
    array: np.ndarray = tensor.detach().float().numpy()
    return array
