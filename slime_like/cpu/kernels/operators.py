"""The kernels as differentiable operators of torch, on float32 tensors in a CPU's memory."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slime_like.cpu.kernels import logit_rows, packed_attention, rms_norm, swiglu
from slime_like.cpu.kernels.tile import LANES


def are_served(*tensors: Tensor) -> bool:
    """Return whether the kernels support such tensors; torch's operators handle all others."""
    return all(t.dtype == torch.float32 and t.device.type == "cpu" and t.is_contiguous() for t in tensors)


def is_served_width(head_dim: int) -> bool:
    """Return whether ``FusedAttention`` supports this head size."""
    return head_dim % LANES == 0


class FusedRMSNorm(torch.autograd.Function):
    """(..., H) by (H,) weights; see ``rms_norm.forward``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = x.detach().view(-1, x.shape[-1])
        out, rstd = torch.empty_like(rows), rows.new_empty(rows.shape[0])
        rms_norm.forward(rows.numpy(), _array(weight), eps, out.numpy(), rstd.numpy())
        ctx.save_for_backward(x, weight, rstd)
        return out.view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        rows = x.detach().view(-1, x.shape[-1])
        grad = grads[0].contiguous().view(rows.shape)
        x_grad, weight_grad = torch.empty_like(rows), torch.empty_like(weight)
        rms_norm.backward(grad.numpy(), rows.numpy(), _array(weight), rstd.numpy(), x_grad.numpy(), weight_grad.numpy())
        return x_grad.view(x.shape), weight_grad, None


class FusedBranch(torch.autograd.Function):
    """(T, H) by (H,) weights to itself and its norm: a residual and what is computed beside it.

    Backward both gradients are one, in one pass.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        out, rstd = torch.empty_like(x), x.new_empty(len(x))
        rms_norm.forward(_array(x), _array(weight), eps, out.numpy(), rstd.numpy())
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
        total = added.new_empty(len(rows), added.shape[1])
        out, rstd = torch.empty_like(total), total.new_empty(len(rows))
        rms_norm.sum_forward(
            *(_array(given) for given in (added, residual, rows, weight)), eps,
            total.numpy(), out.numpy(), rstd.numpy(),
        )  # fmt: skip
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
    carried, grad = (each.contiguous() for each in grads)
    shape = (tokens, total.shape[1])
    total_grad = total.new_empty(shape) if len(rows) == tokens else total.new_zeros(shape)
    weight_grad = torch.empty_like(weight)
    rms_norm.sum_backward(
        *(_array(given) for given in (grad, carried, total, rows, weight, rstd)),
        total_grad.numpy(),
        _array(weight_grad),
    )
    return total_grad, weight_grad


class FusedSwiGLU(torch.autograd.Function):
    """(..., 2 F), gates before ups, to (..., F); see ``swiglu.forward``. Backward overwrites what it was given."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        width = gate_up.shape[-1]
        out = gate_up.new_empty(*gate_up.shape[:-1], width // 2)
        swiglu.forward(gate_up.detach().view(-1, width).numpy(), out.view(-1, width // 2).numpy())
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate_up_grad = _reused(gate_up)
        width = gate_up.shape[-1]
        grad = grads[0].contiguous().view(-1, width // 2)
        swiglu.backward(grad.numpy(), gate_up_grad.view(-1, width).numpy())
        return gate_up_grad


class FusedAttention(torch.autograd.Function):
    """Autograd function of ``packed_attention.forward``.

    Arguments: mixed (T, G, (R + 2) * D); the weights (D,) of the norms of queries and keys, or None for both; their
    eps; cos and sin (T, D / 2); (S + 1,) int64 boundaries; the scale of products.

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
        scale: float,
    ) -> Tensor:
        tokens, groups, width = mixed.shape
        dim = 2 * cos.shape[1]
        out = _empty_or_zeros(mixed, boundaries, (tokens, groups, width - 2 * dim))
        lse = mixed.new_empty(out.shape[1] * out.shape[2] // dim, tokens)
        ctx.setting = (eps, boundaries, scale)
        ctx.save_for_backward(mixed, query_weight, key_weight, cos, sin, out, lse)
        given = _given(mixed, (query_weight, key_weight), (cos, sin), ctx.setting)
        packed_attention.forward(*given, out.numpy(), lse.numpy())
        return out.view(tokens, -1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        mixed, query_weight, key_weight, cos, sin, out, lse = ctx.saved_tensors
        _, boundaries, _ = ctx.setting
        grad, mixed_grad = grads[0].contiguous().view(out.shape), _reused(mixed)
        given = _given(mixed_grad, (query_weight, key_weight), (cos, sin), ctx.setting)
        query_grad, key_grad = np.empty_like(given[2]), np.empty_like(given[3])
        packed_attention.backward(grad.numpy(), *given, out.numpy(), lse.numpy(), query_grad, key_grad)
        mixed_grad[: boundaries[0]] = mixed_grad[boundaries[-1] :] = 0.0
        of_norms = (None, None) if query_weight is None else (torch.from_numpy(query_grad), torch.from_numpy(key_grad))
        return mixed_grad, *of_norms, None, None, None, None, None


class FusedLogitRows:
    """Logits of the head as ``logit_rows`` computes them, in place of torch's operators."""

    def sums(self, products: Tensor, temperatures: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """(n,) maxima of ``products / temperatures``, (n, V), and (3, n) sums as those of ``row_sums``."""
        maximum, sums = products.new_empty(len(products)), products.new_empty(3, len(products))
        logit_rows.forward(
            *(products.numpy(), temperatures.float().numpy(), columns.numpy(), maximum.numpy(), sums.numpy())
        )
        return maximum, sums

    def to_gradient(
        self,
        products: Tensor,
        temperatures: Tensor,
        columns: Tensor,
        softmax: tuple[Tensor, Tensor, Tensor],
        grads: tuple[Tensor, Tensor, Tensor | None],
    ) -> None:
        """Make of ``products`` their gradient; the rest is as ``logit_gradient`` takes it."""
        of_entropy = torch.zeros_like(grads[0]) if grads[2] is None else grads[2]
        rows = (*softmax, *grads[:2], of_entropy)
        logit_rows.backward(
            *(products.numpy(), temperatures.float().numpy(), columns.numpy()),
            *(values.contiguous().numpy() for values in rows),
        )


def _given(
    mixed: Tensor, weights: tuple[Tensor | None, ...], turns: tuple[Tensor, ...], setting: tuple[Any, ...]
) -> tuple[Any, ...]:
    """The kernels' first arguments."""
    eps, boundaries, scale = setting
    norms = (np.empty(0, np.float32) if weight is None else _array(weight) for weight in weights)
    return _array(mixed), boundaries, *norms, eps, *map(_array, turns), scale


def _reused(saved: Tensor) -> Tensor:
    """Reuse the memory of a saved tensor for its gradient, which is as large.

    It lies in the processor's cache then, where new memory would have to be fetched only to be overwritten. torch
    rejects later reads through autograd, such as a second backward.
    """
    torch.autograd.graph.increment_version(saved)
    return saved.detach()


def _empty_or_zeros(like: Tensor, boundaries: np.ndarray, shape: Sequence[int]) -> Tensor:
    """Zeros where there are tokens outside of the boundaries, which the kernels leave alone."""
    whole = boundaries[0] == 0 and boundaries[-1] == shape[0]
    return like.new_empty(shape) if whole else like.new_zeros(shape)


def _array(tensor: Tensor) -> np.ndarray:
    array: np.ndarray = tensor.detach().numpy()
    return array
