"""Versions for a CPU of the kernels of ``transformer_engine_torch`` that training in 8, 16 or 32 bits calls.

They are written from what Transformer Engine's Python code expects of them, with torch's operators, and compute in
float32 or wider. Parameters have the names of the C++ declarations, by which :mod:`tests.te.extension` passes them;
``unused`` are those that do not change what is computed here.
"""

import math
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tests.te import rounding

KERNELS: dict[str, Callable[..., Any]] = {}


def _kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    KERNELS[function.__name__] = function
    return function


def _wide(*tensors: Tensor) -> Iterator[Tensor]:
    """Yield the tensors in at least float32."""
    return (tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors)


# ------------------------------------------------------------------------------------------------------------ products
def _product(a: Any, transposes_a: bool, b: Any, transposes_b: bool) -> Tensor:
    """Return op(B) @ op(A) of row-major matrices, where all dimensions but the last are rows. As on Hopper, products in
    FP8 read both factors along the axis that they sum over."""
    left, right = rounding.matrix(b, columnwise=transposes_b), rounding.matrix(a, columnwise=not transposes_a)
    return (left.t() if transposes_b else left) @ (right.t() if transposes_a else right)


@_kernel
def generic_gemm(
    *, A: Any, transA: bool, B: Any, transB: bool, D: Tensor | None, output_dtype: Any, bias: Tensor | None,
    grad: bool, accumulate: bool, alpha: float, quantizer: None, gelu: bool, comm_overlap: None, extra_output: None,
    **unused: Any,
) -> list[Tensor | None]:  # fmt: skip
    """Return op(B) @ op(A), with the bias or its gradient."""
    assert quantizer is comm_overlap is extra_output is None and not gelu
    out, bias_gradient = _product(A, transA, B, transB) * alpha, None
    if bias is not None and bias.numel():
        if grad:
            assert isinstance(B, Tensor)
            bias_gradient = next(_wide(B)).reshape(-1, B.shape[-1]).sum(0).to(bias.dtype)
        else:
            out = out + bias
    if not transB:
        out = out.view(*B.size()[:-1], out.shape[-1])
    if D is None:
        assert not accumulate
        return [out.to(A.dtype if output_dtype is None else _torch_type(output_dtype)), bias_gradient, None, None]
    assert D.is_contiguous() and D.numel() == out.numel(), (D.shape, out.shape)
    D.add_(out.view_as(D)) if accumulate else D.copy_(out.view_as(D))
    return [D, bias_gradient, None, None]


def _torch_type(kind: Any) -> torch.dtype:
    from transformer_engine.pytorch.constants import TE_DType  # imported after this module

    return {int(value): key for key, value in TE_DType.items()}[int(kind)]


# ------------------------------------------------------------------------------------------------------------- rounding
@_kernel
def quantize(*, tensor: Tensor, quantizer: Any, output: Any, noop: None) -> Any:
    """Return the tensor in FP8."""
    assert noop is None
    made = rounding.quantized(tensor, quantizer)
    if output is not None:
        output.copy_from_storage(made)
    return made if output is None else output


@_kernel
def bgrad_quantize(*, input: Tensor, quantizer: Any) -> tuple[Tensor, Any]:
    """Return the gradient of a bias, and the gradient of the output in FP8."""
    rows = next(_wide(input)).reshape(-1, input.shape[-1])
    return rows.sum(0).to(input.dtype), rounding.quantized(input, quantizer)


@_kernel
def fp8_transpose(*, input: Tensor, out: Tensor | None, **unused: Any) -> Tensor:
    """Return the bytes with the last axis first."""
    transposed = input.movedim(-1, 0).contiguous()
    return transposed if out is None else out.copy_(transposed)


@_kernel
def create_empty_quantized_tensor(*, quantizer: Any, shape: list[int], dtype: torch.dtype, **unused: Any) -> Any:
    """Return a tensor in FP8 whose content is not set."""
    return rounding.empty(quantizer, shape, dtype)


@_kernel
def swap_first_dims(*, tensor: Tensor, out: Tensor) -> Tensor:
    """Copy the tensor with its first two axes swapped."""
    return out.copy_(tensor.transpose(0, 1))


# --------------------------------------------------------------------------------------------------------------- norms
@_kernel
def rmsnorm_fwd(
    *, input: Tensor, weight: Tensor, eps: float, ln_out: Tensor | None, quantizer: Any, zero_centered_gamma: bool,
    **unused: Any,
) -> list[Tensor | None]:  # fmt: skip
    """Return the normed rows, perhaps in FP8, and the reciprocals of the rows' root mean squares."""
    x, gamma = _wide(input, weight)
    scale = (x.square().mean(-1) + eps).rsqrt()
    out = (x * scale[:, None] * (gamma + zero_centered_gamma)).to(input.dtype)
    if quantizer is not None:
        assert ln_out is None
        return [rounding.quantized(out, quantizer), None, scale]
    return [out if ln_out is None else ln_out.copy_(out), None, scale]


@_kernel
def rmsnorm_bwd(
    *, dz: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor, zero_centered_gamma: bool, **unused: Any
) -> list[Tensor]:
    """Return the gradients of the rows and of the weight."""
    gradient, rows, weight = _wide(dz, x, gamma)
    normed, scaled = rows * rsigma[:, None], gradient * (weight + zero_centered_gamma)
    of_rows = rsigma[:, None] * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    return [of_rows.to(x.dtype), (gradient * normed).sum(0).to(gamma.dtype)]


# ----------------------------------------------------------------------------------------------------------- attention
@_kernel
def get_fused_attn_backend(*, fused_attn_params: Any) -> tuple[Any, str]:
    """Return cuDNN's attention for 16 bits and any length."""
    assert fused_attn_params.dropout == 0.0
    return sys.modules["transformer_engine_torch"].NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen, ""


def _sequences(
    cu_seqlens_q: Tensor, cu_seqlens_kv: Tensor, cu_seqlens_q_padded: Tensor | None,
    cu_seqlens_kv_padded: Tensor | None, max_seqlen_q: int, max_seqlen_kv: int, **unused: Any,
) -> Iterator[tuple[slice, slice]]:  # fmt: skip
    """Yield the rows of queries and of keys of each sequence. Padding after a sequence is none of it."""
    queries, keys = (
        [slice(start, start + length) for start, length in zip(begin.tolist(), ends.diff().tolist(), strict=False)]
        for begin, ends in (
            (cu_seqlens_q if cu_seqlens_q_padded is None else cu_seqlens_q_padded, cu_seqlens_q),
            (cu_seqlens_kv if cu_seqlens_kv_padded is None else cu_seqlens_kv_padded, cu_seqlens_kv),
        )
    )
    for rows, columns in zip(queries, keys, strict=True):
        assert rows.stop - rows.start <= max_seqlen_q and columns.stop - columns.start <= max_seqlen_kv
        if rows.stop > rows.start:
            yield rows, columns


def _is_causal(*, qkv_layout: Any, window_size: Any, attn_mask_type: Any, p_dropout: float, **unused: Any) -> bool:
    assert "THD_THD_THD" in qkv_layout.name and tuple(window_size) in ((-1, -1), (-1, 0)) and p_dropout == 0.0
    assert attn_mask_type.name in ("NVTE_PADDING_MASK", "NVTE_PADDING_CAUSAL_MASK"), attn_mask_type
    return attn_mask_type.name == "NVTE_PADDING_CAUSAL_MASK"


def _repeated(groups: Tensor, heads: int) -> Tensor:
    """Repeat each (T, G, D) group for its heads."""
    return groups.repeat_interleave(heads // groups.shape[1], dim=1)


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool) -> Tensor:
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if causal:
        assert len(q) == len(k)
        scores = scores.masked_fill(torch.ones(len(q), len(k), dtype=torch.bool).triu(1), -math.inf)
    return scores


@_kernel
def fused_attn_fwd(
    *, Q: Tensor, K: Tensor, V: Tensor, attn_scale: float, Bias: None, SoftmaxOffset: None, **given: Any
) -> list[Tensor]:
    """Return (T, H, D) attention within each sequence, (T, H, 1) logarithms of its denominators, and random state."""
    assert Bias is SoftmaxOffset is None
    causal, heads = _is_causal(**given), Q.shape[1]
    q, k, v = _wide(Q, _repeated(K, heads), _repeated(V, heads))
    out, lse = q.new_zeros(*Q.shape[:2], V.shape[2]), torch.zeros(len(Q), heads, 1)
    for rows, columns in _sequences(**given):
        scores = _scores(q[rows], k[columns], attn_scale, causal)
        total = scores.logsumexp(-1)
        out[rows] = torch.einsum("hqk,khd->qhd", (scores - total[..., None]).exp(), v[columns])
        lse[rows, :, 0] = total.t().float()
    return [out.to(Q.dtype), lse, torch.zeros(2, dtype=torch.int64)]


@_kernel
def fused_attn_bwd(
    *, Q: Tensor, K: Tensor, V: Tensor, O: Tensor, dO: Tensor, Aux_CTX_Tensors: list[Tensor],  # noqa: E741
    attn_scale: float, **given: Any,
) -> list[Tensor | None]:  # fmt: skip
    """Return the gradients of queries, keys and values. The logarithms may be of more keys than these."""
    causal, heads, groups = _is_causal(**given), Q.shape[1], K.shape[1]
    q, k, v = _wide(Q, _repeated(K, heads), _repeated(V, heads))
    o, do = (x.view(len(Q), heads, -1) for x in _wide(O, dO))
    lse = Aux_CTX_Tensors[0]
    assert lse.shape == (len(Q), heads, 1), lse.shape
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows, columns in _sequences(**given):
        p = (_scores(q[rows], k[columns], attn_scale, causal) - lse[rows].permute(1, 0, 2)).exp()
        dv[columns] += torch.einsum("hqk,qhd->khd", p, do[rows])
        dp = torch.einsum("qhd,khd->hqk", do[rows], v[columns])
        ds = p * (dp - (do[rows] * o[rows]).sum(-1).t()[..., None]) * attn_scale
        dq[rows] += torch.einsum("hqk,khd->qhd", ds, k[columns])
        dk[columns] += torch.einsum("hqk,qhd->khd", ds, q[rows])
    dk, dv = (x.view(len(x), groups, heads // groups, -1).sum(2) for x in (dk, dv))
    return [dq.to(Q.dtype), dk.to(K.dtype), dv.to(V.dtype), None, None]


# ----------------------------------------------------------------------------------- context parallelism of packed rows
def _half(cu_seqlens: Tensor, half: int) -> Tensor:
    """Return the rows of the first or second half of every sequence."""
    parts = []
    for start, end in pairwise(cu_seqlens.tolist()):
        middle = (start + end) // 2
        parts.append(torch.arange(middle, end) if half else torch.arange(start, middle))
    return torch.cat(parts)


@_kernel
def thd_read_half_tensor(*, tensor: Tensor, cu_seqlens: Tensor, half_idx: int) -> Tensor:
    """Return half of every sequence of (T, H, D) rows, or of (2, T, H, D) keys and values."""
    assert tensor.dim() in (3, 4) and cu_seqlens.dtype == torch.int32
    assert tensor.shape[-1] * tensor.shape[-2] * tensor.element_size() % 16 == 0, tensor.shape
    dim, rows = tensor.dim() - 3, _half(cu_seqlens, half_idx)
    shape = list(tensor.shape)
    shape[dim] //= 2
    out = tensor.new_zeros(shape)
    out.narrow(dim, 0, len(rows)).copy_(tensor.index_select(dim, rows))
    return out


@_kernel
def thd_second_half_lse_correction(*, lse: Tensor, lse_per_step: Tensor, cu_seqlens: Tensor, lse_packed: bool) -> None:
    """Add the keys of a step to (H, T) logarithms of denominators, in every sequence's second half."""
    assert lse_packed and lse.dim() == lse_per_step.dim() == 2
    rows = _half(cu_seqlens, 1)
    lse[:, rows] = torch.logaddexp(lse[:, rows], lse_per_step[:, : len(rows)])


@_kernel
def thd_read_second_half_lse(
    *, lse: Tensor, cu_seqlens: Tensor, lse_packed: bool, second_half_lse_seqlen: int
) -> Tensor:
    """Return the logarithms of every sequence's second half, filled up to so many."""
    assert lse_packed and lse.dim() == 2 and second_half_lse_seqlen >= lse.shape[1] // 2
    rows = _half(cu_seqlens, 1)
    out = lse.new_zeros(lse.shape[0], second_half_lse_seqlen)
    out[:, : len(rows)] = lse[:, rows]
    return out


@_kernel
def thd_out_correction(
    *, out: Tensor, out_per_step: Tensor, old_lse: Tensor, lse: Tensor, lse_per_step: Tensor, cu_seqlens: Tensor,
    only_second_half: bool, lse_packed: bool,
) -> None:  # fmt: skip
    """Combine the attention to the earlier steps' keys with that to a step's keys."""
    assert lse_packed and out.dtype == out_per_step.dtype
    rows = _half(cu_seqlens, 1) if only_second_half else torch.arange(int(cu_seqlens[-1]))
    earlier, step = (
        (part - lse[:, rows]).exp().t()[..., None] for part in (old_lse[:, rows], lse_per_step[:, : len(rows)])
    )
    out[rows] = (out[rows] * earlier + out_per_step[: len(rows)] * step).to(out.dtype)


@_kernel
def thd_grad_correction(
    *, grad: Tensor, grad_per_step: Tensor, cu_seqlens: Tensor, first_half: str, second_half: str
) -> None:
    """Add, copy or clear the halves of every sequence."""
    dim = grad.dim() - 3
    for half, action in enumerate((first_half, second_half)):
        rows = _half(cu_seqlens, half)
        if action == "none":
            continue
        if action == "zero":
            grad.index_fill_(dim, rows, 0)
            continue
        is_whole = grad_per_step.shape[dim] == grad.shape[dim]
        part = grad_per_step.index_select(dim, rows) if is_whole else grad_per_step.narrow(dim, 0, len(rows))
        {"add": grad.index_add_, "copy": grad.index_copy_}[action](dim, rows, part)


@_kernel
def thd_get_partitioned_indices(*, cu_seqlens: Tensor, world_size: int, rank: int, **unused: Any) -> Tensor:
    """Return the rows of this rank: of each sequence, one chunk counted from the start and one from the end."""
    parts = []
    for start, end in pairwise(cu_seqlens.tolist()):
        chunk = (end - start) // (2 * world_size)
        parts += [torch.arange(start + rank * chunk, start + (rank + 1) * chunk)]
        parts += [torch.arange(end - (rank + 1) * chunk, end - rank * chunk)]
    return torch.cat(parts).int()


# ----------------------------------------------------------------------------------------------------------- optimizer
@_kernel
def multi_tensor_l2norm(
    *, tensor_lists: list[list[Tensor]], per_tensor_python: bool | None, **unused: Any
) -> tuple[Tensor, Tensor]:
    """Return the norm of all elements, and of each tensor's if asked for."""
    norms = torch.stack([tensor.float().norm() for tensor in tensor_lists[0]])
    return norms.norm()[None], norms if per_tensor_python else torch.empty(0)


@_kernel
def multi_tensor_scale(*, tensor_lists: list[list[Tensor]], scale: Any, **unused: Any) -> None:
    """Write the scaled tensors of the first list into the second list's."""
    for source, target in zip(*tensor_lists, strict=True):
        target.copy_(source * scale)


KERNELS["multi_tensor_scale_tensor"] = multi_tensor_scale


@_kernel
def multi_tensor_adam(
    *, tensor_lists: list[list[Tensor]], lr: float, beta1: float, beta2: float, epsilon: float, step: int, mode: int,
    bias_correction: int, weight_decay: float, **unused: Any,
) -> None:  # fmt: skip
    """Update parameters and moments in place, with decoupled decay (``mode`` 1) or L2 regularization."""
    first, second = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    for gradient, parameter, mean, square, *main in zip(*tensor_lists, strict=True):
        weight = main[0] if main else parameter
        gradient = gradient.float() + (0.0 if mode else weight_decay) * weight
        mean.mul_(beta1).add_(gradient, alpha=1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        update = (mean / first) / ((square / second).sqrt() + epsilon) + (weight_decay if mode else 0.0) * weight
        weight.add_(update, alpha=-lr)
        if main:
            parameter.copy_(weight)
