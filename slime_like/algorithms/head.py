"""The vocabulary-parallel head: from hidden states to logprobs and entropies without [N, V]."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from slime_like.algorithms.logprobs import compute_dtype, row_sums, softmax_gradient
from slime_like.algorithms.masks import require_temperatures
from slime_like.algorithms.tensor_checks import require_targets, require_tensors

Reduce = Callable[[Tensor], object]

_WEIGHT_BLOCK = 8192
_CACHED_ELEMENTS = 2**18


class LogitRows(Protocol):
    """Arithmetic of logits of float32 hidden states on a CPU, in place of torch's operators."""

    def sums(self, products: Tensor, temperatures: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
        """(n,) maxima of ``products / temperatures``, (n, V), and (3, n) sums as those of ``local_sums``."""

    def to_gradient(
        self,
        products: Tensor,
        temperatures: Tensor,
        columns: Tensor,
        softmax: tuple[Tensor, Tensor, Tensor],
        grads: tuple[Tensor, Tensor, Tensor | None],
    ) -> None:
        """Make of ``products`` their gradient.

        Args:
            softmax: (n,) maximum, log-sum-exp above it, and entropy, of the whole vocabulary.
            grads: (n,) of logprobs, of those whose target is one of these columns (else 0), and of entropies, if they
                have one.
        """


def no_reduction(tensor: Tensor) -> None:
    """The reduction of a group of one rank."""


def fused_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    *,
    vocab_start: int = 0,
    vocab_size: int,
    all_reduce_max: Reduce = no_reduction,
    all_reduce_sum: Reduce = no_reduction,
    chunk_tokens: int | None = None,
    softcap: float | None = None,
    rows: LogitRows | None = None,
) -> tuple[Tensor, Tensor]:
    """Logprob of ``targets`` and entropy (nats) under ``softmax(hidden @ weight.T / temperature)``.

    The logits exist for ``chunk_tokens`` tokens at a time, in forward and again in backward; sums are kept in float32
    (float64 for float64 input). Forward calls ``all_reduce_max`` once and ``all_reduce_sum`` once.

    ``hidden`` is an input replicated over the tensor-parallel ranks. Its gradient is complete: backward sums the ranks'
    parts itself, with one call of ``all_reduce_sum``. A gather in front of this function (sequence parallelism) must
    therefore split in its backward, not reduce-scatter. The gradient of ``weight`` is this shard's own.

    Args:
        hidden: (N, H), already selected at the positions whose logits score a response token. N may be 0: results are
            empty, gradients exist and are zero, and no reduction is called (N is the same on all ranks of the group).
        weight: (V_local, H), this rank's rows of the output projection, possibly with padding rows at the end of the
            vocabulary.
        targets: (N,) int64, global token ids; any valid id where the token is masked.
        temperatures: (N,) positive, the logits are divided by them.
        vocab_start: global id of ``weight``'s first row.
        vocab_size: true size of the whole vocabulary; columns at or beyond it never enter a log-sum-exp.
        all_reduce_max, all_reduce_sum: reduce a tensor in place over the tensor-parallel group; needed where ``weight``
            does not hold the whole vocabulary.
        chunk_tokens: tokens whose logits exist at once; none takes a twentieth of them, but at least 64 (for less a
            matrix product does not pay) or what 1 MiB holds of float32 logits, and at most 1,024. Head and gradients
            then need, besides weight, hidden states and their gradients, at most an eighth of what float32 logits of
            all tokens would take from 1,280 tokens on, or a few MiB.
        softcap: c, if the logits are ``c * tanh(hidden @ weight.T / c)`` (Gemma 2, arXiv:2408.00118, section 2).
        rows: what computes float32 logits on a CPU instead of torch's operators; without a softcap.

    Returns:
        Logprobs and entropies, (N,) float32 (float64 for float64 input), both differentiable with respect to
        ``hidden`` and ``weight``.

    Raises:
        ValueError: what is no tensor, hidden states of another type than the weight, shapes that do not fit, a target
            outside the vocabulary, a temperature that is not positive, a part of the vocabulary without reductions, a
            chunk below 1, ``rows`` for what they do not compute.
    """
    require_tensors(hidden=hidden, weight=weight, targets=targets, temperatures=temperatures)
    if hidden.dtype != weight.dtype or not hidden.is_floating_point():
        raise ValueError(
            f"hidden is {hidden.dtype}, weight {weight.dtype}; give floats of one type, e.g. hidden.to(weight.dtype)"
        )
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)} do not fit; give (N, H), (V, H)"
        )
    count = hidden.shape[0]
    if targets.shape != (count,) or temperatures.shape != (count,):
        raise ValueError(
            f"targets {tuple(targets.shape)} and temperatures {tuple(temperatures.shape)} must be ({count},), as hidden"
        )
    if chunk_tokens is None:
        chunk_tokens = min(max(64, _CACHED_ELEMENTS // max(1, weight.shape[0]), -(-count // 20)), 1024)
    require_temperatures(temperatures)
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap={softcap} is no bound of logits; give a number above 0, or none")
    if rows is not None and (softcap is not None or hidden.dtype != torch.float32 or hidden.device.type != "cpu"):
        raise ValueError(
            f"rows are for float32 on a CPU without a softcap; hidden is {hidden.dtype} on {hidden.device}, "
            f"softcap={softcap}: leave them out"
        )
    shard = VocabularyShard.of(targets, weight.shape[0], vocab_start, vocab_size, chunk_tokens)
    shard.require_reductions(vocab_size, all_reduce_max, all_reduce_sum)
    reductions = (all_reduce_max, all_reduce_sum)
    return _FusedLogprobs.apply(hidden, weight, targets, temperatures, shard, *reductions, softcap, rows)


class VocabularyShard:
    """Columns of the vocabulary that this rank holds, padding excluded, and how to walk over tokens."""

    def __init__(self, start: int, columns: int, chunk_tokens: int) -> None:
        self.start, self.columns, self.chunk_tokens = start, columns, chunk_tokens

    @classmethod
    def of(cls, targets: Tensor, held_columns: int, start: int, vocab_size: int, chunk_tokens: int) -> VocabularyShard:
        """The shard of a rank that holds ``held_columns`` from ``start`` on, padding included.

        Raises:
            ValueError: targets that are no integers or outside the vocabulary, no vocabulary, a first column below 0, a
                chunk below 1.
        """
        if start < 0:
            raise ValueError(f"vocab_start={start} is no token's id; give that of the first column")
        if chunk_tokens < 1:
            raise ValueError(f"chunk_tokens={chunk_tokens} holds no token; give 1 or more")
        if vocab_size < 1:
            raise ValueError(f"vocab_size={vocab_size} is no vocabulary; give the number of its tokens")
        require_targets(targets)
        if targets.numel() and (int(targets.min()) < 0 or int(targets.max()) >= vocab_size):
            raise ValueError(
                f"targets reach from {int(targets.min())} to {int(targets.max())}, the vocabulary from 0 to "
                f"{vocab_size - 1}; give the token's own id where it is masked"
            )
        return cls(start, max(0, min(vocab_size - start, held_columns)), chunk_tokens)

    def require_reductions(self, vocab_size: int, all_reduce_max: Reduce, all_reduce_sum: Reduce) -> None:
        """Raises ``ValueError`` for a part of the vocabulary that would be taken for the whole."""
        if self.columns < vocab_size and no_reduction in (all_reduce_max, all_reduce_sum):
            raise ValueError(
                f"{self.columns} columns from {self.start} on are not the whole vocabulary of {vocab_size}; give "
                "all_reduce_max and all_reduce_sum of the group that holds the others"
            )

    def parts(self, count: int) -> list[slice]:
        return [slice(i, min(i + self.chunk_tokens, count)) for i in range(0, count, self.chunk_tokens)]

    def local(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Column of each target (clamped into the shard), and whether this rank holds it."""
        column = targets - self.start
        held = (column >= 0) & (column < self.columns)
        return column.clamp(0, max(0, self.columns - 1)), held


def _scaled_logits(
    hidden: Tensor, weight: Tensor, temperatures: Tensor, dtype: torch.dtype, softcap: float | None
) -> Tensor:
    if hidden.device.type != "cpu" and hidden.dtype in (torch.bfloat16, torch.float16):
        # The tensor cores accumulate in float32 anyway; ask for that instead of a rounded result.
        logits = torch.mm(hidden, weight.t(), out_dtype=torch.float32)
    else:
        logits = (hidden @ weight.t()).to(dtype)
    if softcap is not None:
        logits.div_(softcap).tanh_().mul_(softcap)
    return logits.div_(temperatures.to(dtype)[:, None])


def _softcap_slope(scaled: Tensor, temperatures: Tensor, softcap: float) -> Tensor:
    """What capped logits change with the product's, from the capped and scaled: ``1 - tanh^2``."""
    slope = scaled * (temperatures.to(scaled.dtype)[:, None] / softcap)
    return slope.square_().neg_().add_(1)


class _FusedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperatures: Tensor,
        shard: VocabularyShard,
        all_reduce_max: Reduce,
        all_reduce_sum: Reduce,
        softcap: float | None,
        rows: LogitRows | None,
    ) -> tuple[Tensor, Tensor]:
        dtype = compute_dtype(hidden.dtype)
        count = hidden.shape[0]
        columns = weight[: shard.columns]

        def sums_of(part: slice, column: Tensor) -> tuple[Tensor, Tensor]:
            if rows is not None:
                return rows.sums(hidden[part] @ columns.t(), temperatures[part], column)
            return chunk_sums(_scaled_logits(hidden[part], columns, temperatures[part], dtype, softcap), column)

        maximum, sums = local_sums(shard, targets, dtype, sums_of)
        maximum, log_total, entropy, logprobs = (
            combine_shards(maximum, sums, all_reduce_max, all_reduce_sum) if count else (sums[0],) * 4
        )
        ctx.save_for_backward(hidden, weight, targets, temperatures, maximum, log_total, entropy)
        ctx.shard, ctx.all_reduce_sum, ctx.softcap, ctx.rows = shard, all_reduce_sum, softcap, rows
        ctx.set_materialize_grads(False)
        return logprobs.clone(), entropy.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, _, _, _, log_total, _ = ctx.saved_tensors
        need_hidden, need_weight = ctx.needs_input_grad[:2]
        d_hidden = torch.zeros_like(hidden, dtype=log_total.dtype) if need_hidden else None
        d_weight = torch.zeros_like(weight, dtype=log_total.dtype) if need_weight else None
        _accumulate_gradients(ctx.shard, ctx.saved_tensors, grads, d_hidden, d_weight, ctx.softcap, ctx.rows)
        if d_hidden is not None and hidden.shape[0]:
            ctx.all_reduce_sum(d_hidden)
        return (
            None if d_hidden is None else d_hidden.to(hidden.dtype),
            None if d_weight is None else d_weight.to(weight.dtype),
            *(None,) * 7,
        )


def local_sums(
    shard: VocabularyShard,
    targets: Tensor,
    dtype: torch.dtype,
    sums_of: Callable[[slice, Tensor], tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """(N,) maxima of this rank's logits, and (3, N): sum of exp(x - max), of exp(x - max)(x - max), target logit.

    ``sums_of`` gives both for a slice of tokens and the columns of their targets, as ``chunk_sums``.
    """
    count = targets.numel()
    # A shard that is all padding keeps a finite, very low maximum: its sums are 0 and stay 0, never 0 * inf.
    maximum = torch.full((count,), torch.finfo(dtype).min / 4, dtype=dtype, device=targets.device)
    sums = torch.zeros(3, count, dtype=dtype, device=targets.device)
    if shard.columns == 0:
        return maximum, sums
    for part in shard.parts(count):
        column, held = shard.local(targets[part])
        maximum[part], sums[:, part] = sums_of(part, column)
        sums[2, part].masked_fill_(~held, 0.0)
    return maximum, sums


def chunk_sums(x: Tensor, column: Tensor) -> tuple[Tensor, Tensor]:
    """(n,) maxima and (3, n) sums of temperature-scaled logits (n, V), which are overwritten."""
    target = x.gather(1, column[:, None]).squeeze(1)
    maximum, total, product = row_sums(x, overwrite=True)
    return maximum, torch.stack((total, product, target))


def combine_shards(
    local_maximum: Tensor, sums: Tensor, all_reduce_max: Reduce, all_reduce_sum: Reduce
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Maximum and what the log-sum-exp is above it, entropy and target logprob over all shards.

    From each shard's sums relative to its own maximum.
    """
    maximum = local_maximum.clone()
    all_reduce_max(maximum)
    shift = local_maximum - maximum
    scale = shift.exp()
    sums[1] = scale * (sums[1] + shift * sums[0])
    sums[0] *= scale
    all_reduce_sum(sums)
    log_total = sums[0].log()
    return maximum, log_total, log_total - sums[1] / sums[0], sums[2] - maximum - log_total


def _accumulate_gradients(
    shard: VocabularyShard,
    saved: tuple[Tensor, ...],
    grads: tuple[Tensor | None, ...],
    d_hidden: Tensor | None,
    d_weight: Tensor | None,
    softcap: float | None,
    rows: LogitRows | None,
) -> None:
    hidden, weight, targets, temperatures, maximum, log_total, entropy = saved
    grad_logprobs, grad_entropy = grads
    if shard.columns == 0 or (grad_logprobs is None and grad_entropy is None):
        return
    grad = torch.zeros_like(log_total) if grad_logprobs is None else grad_logprobs
    columns = weight[: shard.columns]
    for part in shard.parts(hidden.shape[0]):
        column, held = shard.local(targets[part])
        softmax = (maximum[part], log_total[part], entropy[part])
        entropy_part = None if grad_entropy is None else grad_entropy[part]
        own = (grad[part], grad[part].masked_fill(~held, 0.0), entropy_part)
        if rows is None:
            x = _scaled_logits(hidden[part], columns, temperatures[part], log_total.dtype, softcap)
            dx = _chunk_gradient(x, temperatures[part], column, softmax, own, softcap).to(hidden.dtype)
            del x  # its memory is the gradient's now
        else:
            dx = hidden[part] @ columns.t()
            rows.to_gradient(dx, temperatures[part], column, softmax, own)
        if d_hidden is not None:
            d_hidden[part] = (dx @ columns).to(d_hidden.dtype)
        if d_weight is not None:
            _add_weight_gradient(d_weight[: shard.columns], dx, hidden[part])
        del dx  # before the next chunk is made


def _chunk_gradient(
    x: Tensor,
    temperatures: Tensor,
    column: Tensor,
    softmax: tuple[Tensor, Tensor, Tensor],
    grads: tuple[Tensor, Tensor, Tensor | None],
    softcap: float | None,
) -> Tensor:
    """Gradient of the products that (n, V) temperature-scaled logits were made of, in their memory."""
    slope = None if softcap is None else _softcap_slope(x, temperatures, softcap)
    grad, grad_target, grad_entropy = grads
    dx = softmax_gradient(x, *softmax, grad, grad_entropy, overwrite=True)
    dx.scatter_add_(1, column[:, None], grad_target[:, None])
    dx.div_(temperatures.to(dx.dtype)[:, None])
    return dx if slope is None else dx.mul_(slope)


def _add_weight_gradient(d_weight: Tensor, dx: Tensor, hidden: Tensor) -> None:
    """Add ``dx.T @ hidden``, (V, H), without a second tensor of that size.

    Products in the model's precision, sums in that of ``d_weight``, a block of the vocabulary at a time. A block's
    product is made by itself and then added: one that adds to what is there rounds at every token of all chunks, by
    which float32 lost a digit over 1,400 tokens. Only where blocks of one precision would have to be copied it does so.
    """
    if dx.dtype == d_weight.dtype and d_weight.shape[0] > _WEIGHT_BLOCK:
        d_weight.addmm_(dx.t(), hidden)
        return
    for block, rows in zip(d_weight.split(_WEIGHT_BLOCK), dx.split(_WEIGHT_BLOCK, dim=1), strict=True):
        block += rows.t() @ hidden
