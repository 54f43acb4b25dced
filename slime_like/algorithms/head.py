"""The vocabulary-parallel head: from hidden states to logprobs and entropies without [N, V]."""

from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor

from slime_like.algorithms.softmax import RowGradients, RowValues, compute_dtype, logit_gradient, row_sums
from slime_like.algorithms.supports import forbid_outside
from slime_like.algorithms.tensor_checks import expanded_temperatures, require_alike, require_known_targets
from slime_like.algorithms.vocabulary_shard import Reduce, Sums, VocabularyShard, no_reduction

_HAS_TRITON = find_spec("triton") is not None
_WEIGHT_BLOCK = 8192
_CACHED_ELEMENTS = 2**18
_LEAST_TOKENS = 128
"""In micro-batches of 2,048 tokens on two cores, training of 135M parameters with 49,152 tokens takes 0.91 of its time
with 64."""

_DEVICE_TOKENS = 1024, 2048
_DEVICE_ELEMENTS = 2**28
"""Logits of a chunk on a device: 1 GiB in float32. Every chunk reads and writes the weight's float32 gradient, which
takes 180 / tokens of the time of its four products on an H100 (3.3 TB/s, 600 TFLOP/s)."""


def fused_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperatures: Tensor | float,
    *,
    vocab_start: int = 0,
    vocab_size: int,
    all_reduce_max: Reduce = no_reduction,
    all_reduce_sum: Reduce = no_reduction,
    chunk_tokens: int | None = None,
    softcap: float | None = None,
    supports: Tensor | None = None,
    check_values: bool = True,
) -> tuple[Tensor, Tensor]:
    """Logprob of ``targets`` and entropy (nats) under ``softmax(hidden @ weight.T / temperature)``.

    The logits exist for ``chunk_tokens`` tokens at a time, in forward and again in backward; sums are kept in float32
    (float64 for float64 input). Forward calls ``all_reduce_max`` once and ``all_reduce_sum`` once.

    Memory besides weight, hidden states and their float32 gradients: on a device at most 8 bytes per logit of a chunk,
    or 6 in bfloat16 with Triton's kernels. On a CPU the default chunks need at most an eighth of the float32 logits of
    all tokens from 2,560 tokens on, or a few MiB.

    ``hidden`` is an input replicated over the tensor-parallel ranks. Its gradient is complete: backward sums the ranks'
    parts itself, with one call of ``all_reduce_sum``. A gather in front of this function (sequence parallelism) must
    therefore split in its backward, not reduce-scatter. The gradient of ``weight`` is this shard's own.

    Args:
        hidden: (N, H), already selected at the positions whose logits score a response token. N may be 0: results are
            empty, gradients exist and are zero, and no reduction is called (N is the same on all ranks of the group).
        weight: (V_local, H), this rank's rows of the output projection, possibly with padding rows at the end of the
            vocabulary.
        targets: (N,) int64, global token ids; a negative one gives logprob 0 without gradient.
        temperatures: what the logits are divided by, positive: a number, or a tensor that expands to (N,).
        vocab_start: global id of ``weight``'s first row.
        vocab_size: true size of the whole vocabulary; columns at or beyond it never enter a log-sum-exp.
        all_reduce_max, all_reduce_sum: reduce in place over the tensor-parallel group, if ``weight`` is a part.
        chunk_tokens: tokens whose logits exist at the same time. ``None`` takes, on a device, the tokens whose float32
            logits fit into 1 GiB, but at least 1,024 and at most 2,048. On a CPU it takes a twentieth of the tokens,
            but at least 128 or what 1 MiB holds of float32 logits, and at most 1,024.
        softcap: c, if the logits are ``c * tanh(hidden @ weight.T / c)`` (Gemma 2, arXiv:2408.00118, section 2).
        supports: (N, K) of truncated sampling, as in ``forbid_outside``: log-sum-exps, entropies and gradients are over
            these tokens alone, and a target outside of them has a logprob of -inf.
        check_values: False where targets and temperatures were checked before they went to a device: reading waits.

    Returns:
        Logprobs and entropies, (N,) float32 (float64 for float64 input), with gradients to ``hidden`` and ``weight``.

    Raises:
        ValueError: shapes that do not fit, a target beyond the vocabulary, a temperature that is not positive, a part
            of the vocabulary without reductions.
    """
    if check_values:
        require_known_targets(targets, vocab_size)
    if check_values or not isinstance(temperatures, Tensor):
        temperatures = expanded_temperatures(temperatures, targets)
    require_alike(targets=targets, temperatures=temperatures, hidden=hidden[:, 0])
    chunk_tokens = default_chunk(hidden.shape[0], weight) if chunk_tokens is None else chunk_tokens
    reductions = all_reduce_max, all_reduce_sum
    shard = VocabularyShard.of(targets, weight.shape[0], vocab_start, vocab_size, chunk_tokens, reductions)
    return _FusedLogprobs.apply(hidden, weight, targets, temperatures, shard, softcap, supports)


def default_chunk(tokens: int, weight: Tensor) -> int:
    """Return the ``chunk_tokens`` of ``fused_logprobs`` for this many tokens. Shapes ("meta") stand for a device."""
    columns = max(1, weight.shape[0])
    if not weight.is_cpu:
        least, most = _DEVICE_TOKENS
        return min(max(least, _DEVICE_ELEMENTS // columns), most)
    return min(max(_LEAST_TOKENS, _CACHED_ELEMENTS // columns, -(-tokens // 20)), 1024)


def row_kernels(device: torch.device) -> Literal["triton", "torch"]:
    """Return what computes rows of logits on ``device``: Triton's kernels on CUDA if Triton is installed."""
    return "triton" if device.type == "cuda" and _HAS_TRITON else "torch"


def _logits(hidden: Tensor, weight: Tensor, dtype: torch.dtype, softcap: float | None) -> Tensor:
    logits = _product(hidden, weight.t()).to(dtype)
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` in their type; on a device in float32 at least, in which its cores add up anyway."""
    if a.device.type != "cpu" and a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=torch.float32)
    return a @ b


def _row_sums(x: Tensor, temperatures: Tensor, column: Tensor, forbids: bool) -> tuple[Tensor, Sums]:
    """``row_sums`` of ``x / temperatures``, in the memory of the logits ``x``."""
    if row_kernels(x.device) == "triton":
        from slime_like.algorithms import softmax_kernels  # needs Triton

        return softmax_kernels.row_sums(x, temperatures, column)
    return row_sums(x.div_(temperatures.to(x.dtype)[:, None]), column, overwrite=True, forbids=forbids)


class _FusedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperatures: Tensor,
        shard: VocabularyShard,
        softcap: float | None,
        supports: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        dtype = compute_dtype(hidden.dtype)
        columns = weight[: shard.columns]

        def sums_of(part: slice, column: Tensor) -> tuple[Tensor, Sums]:
            x = _logits(hidden[part], columns, dtype, softcap)
            if supports is not None:
                forbid_outside(x, supports[part], shard.start)
            return _row_sums(x, temperatures[part], column, supports is not None)

        maximum, log_total, entropy, logprobs = shard.scores(targets, dtype, sums_of)
        ctx.save_for_backward(hidden, weight, targets, temperatures, maximum, log_total, entropy)
        ctx.shard, ctx.softcap, ctx.supports = shard, softcap, supports  # ids of no graph
        ctx.set_materialize_grads(False)
        return logprobs, entropy.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, temperatures, *softmax = ctx.saved_tensors
        dtype, (of_hidden, of_weight, *_) = softmax[1].dtype, ctx.needs_input_grad
        d_hidden = torch.zeros_like(hidden, dtype=dtype) if of_hidden else None
        d_weight = _zeros_for_sums(weight, dtype) if of_weight else None
        columns = weight[: ctx.shard.columns]
        for part, given in ctx.shard.gradients(targets, softmax, grads):
            kept = None if ctx.supports is None else (ctx.supports[part], ctx.shard.start)
            dx = _logit_gradient(hidden[part], columns, temperatures[part], given, ctx.softcap, kept)
            if d_hidden is not None:
                d_hidden[part] = _product(dx, columns)
            if d_weight is not None:
                _add_weight_gradient(d_weight[: ctx.shard.columns], dx, hidden[part])
            del dx  # before the next chunk is made
        if d_hidden is not None and hidden.shape[0]:
            ctx.shard.all_reduce_sum(d_hidden)
        return (
            None if d_hidden is None else d_hidden.to(hidden.dtype),
            None if d_weight is None else d_weight.to(weight.dtype),
            *(None,) * 5,
        )


def _logit_gradient(
    hidden: Tensor,
    columns: Tensor,
    temperatures: Tensor,
    given: tuple[Tensor, RowValues, RowGradients],
    softcap: float | None,
    kept: tuple[Tensor, int] | None,
) -> Tensor:
    """Of one chunk of tokens, (n, V): the gradient of ``hidden @ columns.T``, in the type of ``hidden``."""
    dtype, by_triton = given[1][1].dtype, row_kernels(hidden.device) == "triton"
    x = _logits(hidden, columns, dtype, softcap)
    slope = None if softcap is None or by_triton else (x / softcap).square_().neg_().add_(1)  # 1 - tanh^2
    if kept is not None:
        forbid_outside(x, *kept)
    if by_triton:
        from slime_like.algorithms import softmax_kernels  # needs Triton

        return softmax_kernels.logit_gradient(x, temperatures, *given, hidden.dtype, softcap)
    x.div_(temperatures.to(dtype)[:, None])
    dx = logit_gradient(x, temperatures, *given, overwrite=True, forbids=kept is not None)
    return (dx if slope is None else dx.mul_(slope)).to(hidden.dtype)


def _zeros_for_sums(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """(V, H) zeros for ``_add_weight_gradient``.

    Of a large vocabulary in float32 on a CPU they lie in memory as (H, V): products of its rows take 1.7 times as long.
    """
    if weight.is_cpu and weight.dtype == torch.float32 and weight.shape[0] > _WEIGHT_BLOCK:
        return weight.new_zeros(weight.shape[::-1], dtype=dtype).t()
    return torch.zeros_like(weight, dtype=dtype)


def _add_weight_gradient(d_weight: Tensor, dx: Tensor, hidden: Tensor) -> None:
    """Add ``dx.T @ hidden``, (V, H), without a second tensor of that size."""
    if not d_weight.is_cpu:  # a device adds the finished sum over the chunk's tokens to what is there, once
        if d_weight.dtype == hidden.dtype:
            d_weight.addmm_(dx.t(), hidden)
        else:
            torch.addmm(d_weight, dx.t(), hidden, out_dtype=d_weight.dtype, out=d_weight)
        return
    # A CPU's product rounds at every token if it adds to what is there, by which float32 lost a digit over 1,400
    # tokens. A block of the vocabulary is therefore made by itself and then added.
    in_columns = d_weight.stride(1) > 1
    for block, part in zip(d_weight.split(_WEIGHT_BLOCK), dx.split(_WEIGHT_BLOCK, dim=1), strict=True):
        block += (hidden.t() @ part.contiguous()).t() if in_columns else part.t() @ hidden
