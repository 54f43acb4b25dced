"""The vocabulary-parallel head: logprobs, entropies and the exact KL from hidden states, without [N, V] logits."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from slime_like.algorithms.segments import expanded_temperatures, require_alike, require_known_targets
from slime_like.algorithms.softmax import (
    Reduce,
    RowGradients,
    RowValues,
    Sums,
    VocabularyShard,
    compute_dtype,
    forbid_outside,
    logit_gradient,
    no_reduction,
    row_sums,
)

_HAS_TRITON = find_spec("triton") is not None
_WEIGHT_BLOCK = 8192
_CACHED_ELEMENTS = 2**18
_LEAST_TOKENS = 128
"""Least tokens of a chunk on a CPU. Compared with 64, training 135M parameters with a vocabulary of 49,152 on two cores
takes 0.91 of the time (micro-batches of 2,048 tokens)."""

_DEVICE_TOKENS = 1024, 2048
_DEVICE_ELEMENTS = 2**28
"""Logits of a chunk on a device: 1 GiB in float32. Every chunk reads and writes the weight's float32 gradient, which
takes 180 / tokens of the time of the chunk's four products on an H100 (3.3 TB/s, 600 TFLOP/s)."""


def values_of(hidden: Tensor, weight: Tensor) -> Tensor:
    """Return (1, N) values, at least float32, of (N, H) hidden states with a head's (1, H) weight."""
    dtype = compute_dtype(hidden.dtype)
    return weight.to(dtype) @ hidden.to(dtype).T


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
    """Compute logprobs of ``targets`` and entropies (nats) under ``softmax(hidden @ weight.T / temperature)``.

    The logits exist for ``chunk_tokens`` tokens at a time, in forward and again in backward. Sums are float32 (float64
    for float64 input). Forward calls each reduction once.

    Memory besides weight, hidden states and their float32 gradients: on a device at most 8 bytes per logit of a chunk,
    or 6 in bfloat16 with Triton. On a CPU the default chunks need a few MiB or, from 2,560 tokens on, at most an eighth
    of the float32 logits of all tokens.

    ``hidden`` is replicated over the tensor-parallel ranks. Backward sums the ranks' parts of its gradient with one
    call of ``all_reduce_sum``. A gather before this function (sequence parallelism) must therefore split in its
    backward, not reduce-scatter. The gradient of ``weight`` is the shard's.

    Args:
        hidden: (N, H) at the positions whose logits score a response token. If N is 0 (on all ranks), results are
            empty, gradients are zero, and no reduction is called.
        weight: (V_local, H), this rank's rows of the output projection, perhaps with padding at the vocabulary's end.
        targets: (N,) int64 global token ids; a negative one gives logprob 0 without gradient.
        temperatures: positive divisors of the logits: a number, or a tensor that expands to (N,).
        vocab_start: global id of ``weight``'s first row.
        vocab_size: true size of the whole vocabulary. Columns beyond it never enter a log-sum-exp.
        all_reduce_max, all_reduce_sum: reduce in place over the tensor-parallel group, if ``weight`` is a part.
        chunk_tokens: tokens whose logits exist at the same time; ``default_chunk`` by default.
        softcap: c, if the logits are ``c * tanh(hidden @ weight.T / c)`` (Gemma 2, arXiv:2408.00118, section 2).
        supports: (N, K) of truncated sampling, as in ``forbid_outside``. Only these tokens count, and a target outside
            has logprob -inf.
        check_values: False if targets and temperatures were checked before they went to a device: reading waits.

    Returns:
        Logprobs and entropies, (N,) float32 (float64 for float64 input), with gradients to ``hidden`` and ``weight``.

    Raises:
        ValueError: shapes don't fit, a target is beyond the vocabulary, a temperature isn't positive, or a part of the
            vocabulary has no reductions.
    """
    if check_values:
        require_known_targets(targets, vocab_size)
    if check_values or not isinstance(temperatures, Tensor):
        temperatures = expanded_temperatures(temperatures, targets)
    require_alike(targets=targets, temperatures=temperatures, hidden=hidden[:, 0])
    chunk_tokens = default_chunk(hidden.shape[0], weight) if chunk_tokens is None else chunk_tokens
    reductions = all_reduce_max, all_reduce_sum
    shard = VocabularyShard.of(weight.shape[0], vocab_start, vocab_size, chunk_tokens, reductions)
    return FusedLogprobs.apply(hidden, weight, targets, temperatures, shard, softcap, supports)


def default_chunk(tokens: int, weight: Tensor) -> int:
    """Return the default ``chunk_tokens`` of ``fused_logprobs``. A "meta" tensor represents a device.

    On a device: the tokens whose float32 logits fit into 1 GiB, but 1,024 to 2,048. On a CPU: a twentieth of the
    tokens, but at least 128 or what 1 MiB of float32 logits holds, and at most 1,024.
    """
    columns = max(1, weight.shape[0])
    if not weight.is_cpu:
        least, most = _DEVICE_TOKENS
        return min(max(least, _DEVICE_ELEMENTS // columns), most)
    return min(max(_LEAST_TOKENS, _CACHED_ELEMENTS // columns, -(-tokens // 20)), 1024)


def row_kernels(device: torch.device) -> Literal["triton", "torch"]:
    """Return which kernels process rows of logits on ``device``: Triton's on CUDA if Triton is installed."""
    return "triton" if device.type == "cuda" and _HAS_TRITON else "torch"


def _logits_of(hidden: Tensor, weight: Tensor | None, dtype: torch.dtype, softcap: float | None) -> Tensor:
    """Return (n, V) capped logits in newly allocated memory. Without a weight, ``hidden`` already holds the logits."""
    if weight is None:
        return hidden.to(dtype, copy=not hidden.is_cpu)  # Triton's kernels overwrite them
    logits = _product(hidden, weight.t()).to(dtype)
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b`` in their type; on a device in float32 at least, in which its cores accumulate anyway."""
    if a.device.type != "cpu" and a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=torch.float32)
    return a @ b


def _by_triton(device: torch.device) -> Any:
    """Return the module with Triton's kernels, if they process rows of logits on ``device``."""
    return import_module("slime_like.algorithms.softmax_kernels") if row_kernels(device) == "triton" else None


def _tempered(x: Tensor, temperatures: Tensor | None, owned: bool) -> tuple[Tensor, bool]:
    """Return ``x / temperatures``, and whether it may be overwritten, as ``x`` may if it is ``owned``."""
    if temperatures is None:
        return x, owned
    scale = temperatures.to(x.dtype)[:, None]
    return x.div_(scale) if owned else x / scale, True


class FusedLogprobs(torch.autograd.Function):
    """Logprobs and entropies of ``fused_logprobs``, or of logits ``hidden`` without a ``weight``."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor | None,
        targets: Tensor,
        temperatures: Tensor | None,
        shard: VocabularyShard,
        softcap: float | None,
        supports: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        dtype = compute_dtype(hidden.dtype)
        columns = None if weight is None else weight[: shard.columns]

        def sums_of(part: slice, column: Tensor) -> tuple[Tensor, Sums]:
            x = _logits_of(hidden[part], columns, dtype, softcap)
            if supports is not None:
                forbid_outside(x, supports[part], shard.start)
            own = None if temperatures is None else temperatures[part]
            if (kernels := _by_triton(x.device)) is not None:
                return cast("tuple[Tensor, Sums]", kernels.row_sums(x, own, column))
            x, owned = _tempered(x, own, weight is not None)
            return row_sums(x, column, owned, weight is None or supports is not None)

        maximum, log_total, entropy, logprobs = shard.scores(targets, dtype, sums_of)
        ctx.save_for_backward(hidden, weight, targets, temperatures, maximum, log_total, entropy)
        ctx.shard, ctx.softcap, ctx.supports = shard, softcap, supports  # ids without a graph
        ctx.set_materialize_grads(False)
        return logprobs, entropy.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, temperatures, *softmax = ctx.saved_tensors
        dtype, (of_hidden, of_weight, *_) = softmax[1].dtype, ctx.needs_input_grad
        d_hidden = torch.zeros_like(hidden, dtype=None if weight is None else dtype) if of_hidden else None
        d_weight = _zeros_for_sums(weight, dtype) if of_weight else None
        columns = None if weight is None else weight[: ctx.shard.columns]
        for part, given in ctx.shard.gradients(targets, softmax, grads):
            kept = None if ctx.supports is None else (ctx.supports[part], ctx.shard.start)
            own = None if temperatures is None else temperatures[part]
            dx = _logit_gradient(hidden[part], columns, own, given, ctx.softcap, kept)
            if d_hidden is not None:
                d_hidden[part] = dx if columns is None else _product(dx, columns)
            if d_weight is not None:
                _add_weight_gradient(d_weight[: ctx.shard.columns], dx, hidden[part])
            del dx  # before the next chunk allocates its own
        if d_hidden is not None and hidden.shape[0]:
            ctx.shard.all_reduce_sum(d_hidden)
        return (
            None if d_hidden is None else d_hidden.to(hidden.dtype),
            None if d_weight is None else d_weight.to(weight.dtype),
            *(None,) * 5,
        )


def _logit_gradient(
    hidden: Tensor,
    columns: Tensor | None,
    temperatures: Tensor | None,
    given: tuple[Tensor, RowValues, RowGradients],
    softcap: float | None,
    kept: tuple[Tensor, int] | None,
) -> Tensor:
    """Return the (n, V) gradient of ``hidden @ columns.T`` of one chunk, in the type of ``hidden``."""
    dtype, kernels = given[1][1].dtype, _by_triton(hidden.device)
    x = _logits_of(hidden, columns, dtype, softcap)
    slope = None if softcap is None or kernels else (x / softcap).square_().neg_().add_(1)  # 1 - tanh^2
    if kept is not None:
        forbid_outside(x, *kept)
    if kernels is not None:
        return cast(Tensor, kernels.logit_gradient(x, temperatures, *given, hidden.dtype, softcap))
    x, owned = _tempered(x, temperatures, columns is not None)
    dx = logit_gradient(x, temperatures, *given, owned, columns is None or kept is not None)
    return (dx if slope is None else dx.mul_(slope)).to(hidden.dtype)


def _zeros_for_sums(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (V, H) zeros for ``_add_weight_gradient``.

    For a large float32 vocabulary on a CPU they are (H, V) in memory: products of rows would take 1.7 times as long.
    """
    if weight.is_cpu and weight.dtype == torch.float32 and weight.shape[0] > _WEIGHT_BLOCK:
        return weight.new_zeros(weight.shape[::-1], dtype=dtype).t()
    return torch.zeros_like(weight, dtype=dtype)


def _add_weight_gradient(d_weight: Tensor, dx: Tensor, hidden: Tensor) -> None:
    """Add ``dx.T @ hidden``, (V, H), without a second tensor of that size."""
    if not d_weight.is_cpu:  # a device adds the chunk's finished sum once
        if d_weight.dtype == hidden.dtype:
            d_weight.addmm_(dx.t(), hidden)
        else:
            torch.addmm(d_weight, dx.t(), hidden, out_dtype=d_weight.dtype, out=d_weight)
        return
    # A CPU's product rounds at every token if it adds to an existing sum. Over 1,400 tokens float32 loses a digit. So a
    # block of the vocabulary is computed separately and then added.
    in_columns = d_weight.stride(1) > 1
    for block, part in zip(d_weight.split(_WEIGHT_BLOCK), dx.split(_WEIGHT_BLOCK, dim=1), strict=True):
        block += (hidden.t() @ part.contiguous()).t() if in_columns else part.t() @ hidden


# ---------------------------------------------------------------------------------------- reverse KL
class Head(NamedTuple):
    """One model's last hidden states and output projection; see ``fused_logprobs``.

    Attributes:
        hidden: (N, H).
        weight: (V_local, H), this rank's rows, perhaps with padding at the vocabulary's end.
        temperatures: (N,) positive divisors of the logits.
        softcap: cap of the logits.
    """

    hidden: Tensor
    weight: Tensor
    temperatures: Tensor
    softcap: float | None = None


def fused_reverse_kl(
    student: Head,
    teacher: Head,
    *,
    vocab_start: int = 0,
    vocab_size: int,
    all_reduce_max: Reduce = no_reduction,
    all_reduce_sum: Reduce = no_reduction,
    chunk_tokens: int | None = None,
) -> Tensor:
    """Compute ``sum_v p_v (log p_v - log q_v)`` (nats) of the student's distribution p and the teacher's q.

    Both models' logits exist for ``chunk_tokens`` tokens at a time, in forward and again in backward; at most four
    tensors of that size. The models may have different hidden sizes. Reductions and gradients are as in
    ``fused_logprobs``; the teacher has no gradient.

    Args:
        student, teacher: heads with the same columns of the vocabulary on this rank.
        vocab_start, vocab_size, all_reduce_max, all_reduce_sum: as in ``fused_logprobs``.
        chunk_tokens: tokens whose logits exist at the same time; half of ``default_chunk`` by default.

    Returns:
        (N,) float32 (float64 for float64 input), with a gradient to the student's hidden states and weight.

    Raises:
        ValueError: a part of the vocabulary has no reductions.
    """
    chunk = chunk_tokens or max(1, default_chunk(len(student.hidden), student.weight) // 2)
    shard = VocabularyShard.of(len(student.weight), vocab_start, vocab_size, chunk, (all_reduce_max, all_reduce_sum))
    found: Tensor = _ReverseKL.apply(student.hidden, student.weight, student, teacher, shard)
    return found


def _scaled(head: Head, part: slice, columns: int, dtype: torch.dtype) -> Tensor:
    logits = _logits_of(head.hidden[part], head.weight[:columns], dtype, head.softcap)
    return logits.div_(head.temperatures[part].to(dtype)[:, None])


class _ReverseKL(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, student: Head, teacher: Head, shard: VocabularyShard
    ) -> Tensor:
        count, dtype, device = len(hidden), compute_dtype(hidden.dtype), student.temperatures.device
        # A shard of only padding keeps a finite, very low maximum: its sums stay 0, never 0 * inf.
        local = torch.full((2, count), torch.finfo(dtype).min / 4, dtype=dtype, device=device)
        sums = torch.zeros(3, count, dtype=dtype, device=device)
        for part in shard.parts(count):
            x, y = (_scaled(head, part, shard.columns, dtype) for head in (student, teacher))
            for logits, maximum in zip((x, y), local, strict=True):
                maximum[part] = logits.amax(1)
                logits -= maximum[part, None]
            gap = x - y
            sums[0, part], sums[2, part] = x.exp_().sum(1), y.exp_().sum(1)
            sums[1, part] = gap.mul_(x).sum(1)
        maxima = local.clone()
        if count:
            shard.all_reduce_max(maxima)
        shift = local - maxima
        scale = shift.exp()
        sums[1] = scale[0] * (sums[1] + (shift[0] - shift[1]) * sums[0])
        sums[::2] *= scale
        if count:
            shard.all_reduce_sum(sums)
        totals = sums[::2].log()
        kl = sums[1] / sums[0] - totals[0] + totals[1]
        ctx.save_for_backward(hidden, weight, maxima, totals, kl)
        ctx.student, ctx.teacher, ctx.shard = student[2:], teacher, shard
        return kl.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, maxima, totals, kl = ctx.saved_tensors
        student, teacher = Head(hidden, weight, *ctx.student), ctx.teacher
        (of_hidden, of_weight, *_), count, shard = ctx.needs_input_grad, len(hidden), ctx.shard
        d_hidden = torch.zeros_like(hidden, dtype=kl.dtype) if of_hidden else None
        d_weight = _zeros_for_sums(weight, kl.dtype) if of_weight else None
        columns = weight[: shard.columns]
        for part in shard.parts(count):
            x, y = (_scaled(head, part, shard.columns, kl.dtype) for head in (student, teacher))
            scale = student.temperatures[part].to(kl.dtype)[:, None]
            slope = grads[0][part, None] / scale
            if student.softcap is not None:  # 1 - tanh^2
                slope = (x * (scale / student.softcap)).square_().neg_().add_(1).mul_(slope)
            for logits, maximum, total in zip((x, y), maxima, totals, strict=True):
                logits.sub_(maximum[part, None]).sub_(total[part, None])
            dx = torch.sub(x, y, out=y).sub_(kl[part, None]).mul_(x.exp_()).mul_(slope).to(hidden.dtype)
            if d_hidden is not None:
                d_hidden[part] = _product(dx, columns)
            if d_weight is not None:
                _add_weight_gradient(d_weight[: shard.columns], dx, hidden[part])
            del x, y, slope, dx  # before the next chunk allocates its own
        if d_hidden is not None and count:
            shard.all_reduce_sum(d_hidden)
        made = (None if each is None else each.to(hidden.dtype) for each in (d_hidden, d_weight))
        return (*made, None, None, None)
