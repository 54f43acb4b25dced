"""The exact reverse KL between two vocabulary-parallel heads, without [N, V] logits."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from slime_like.algorithms.head import add_weight_gradient, default_chunk, logits_of, product, zeros_for_sums
from slime_like.algorithms.softmax import Reduce, VocabularyShard, compute_dtype, no_reduction


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
    logits = logits_of(head.hidden[part], head.weight[:columns], dtype, head.softcap)
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
        d_weight = zeros_for_sums(weight, kl.dtype) if of_weight else None
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
                d_hidden[part] = product(dx, columns)
            if d_weight is not None:
                add_weight_gradient(d_weight[: shard.columns], dx, hidden[part])
            del x, y, slope, dx  # before the next chunk allocates its own
        if d_hidden is not None and count:
            shard.all_reduce_sum(d_hidden)
        made = (None if each is None else each.to(hidden.dtype) for each in (d_hidden, d_weight))
        return (*made, None, None, None)
