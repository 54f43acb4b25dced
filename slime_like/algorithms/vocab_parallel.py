"""Logprobs and entropies of logits whose columns are spread over the ranks of a tensor-parallel group."""

from typing import Any

import torch
from torch import Tensor

from slime_like.algorithms.logprobs import compute_dtype, softmax_gradient
from slime_like.algorithms.masks import require_temperatures
from slime_like.algorithms.tensor_checks import require_tensors
from slime_like.algorithms.vocabulary_shard import (
    Reduce,
    VocabularyShard,
    chunk_sums,
    combine_shards,
    local_sums,
    no_reduction,
)


def vocab_parallel_logprobs(
    logits: Tensor,
    targets: Tensor,
    temperatures: Tensor,
    *,
    vocab_start: int = 0,
    vocab_size: int,
    all_reduce_max: Reduce = no_reduction,
    all_reduce_sum: Reduce = no_reduction,
    chunk_tokens: int = 1024,
) -> tuple[Tensor, Tensor]:
    """Logprob of ``targets`` and entropy (nats), from this rank's columns of the logits.

    The split of Megatron-LM's vocabulary-parallel cross entropy (arXiv:1909.08053, section 3), in one pass: forward
    calls ``all_reduce_max`` once and ``all_reduce_sum`` once, backward neither. No softmax is kept: it is computed
    again, ``chunk_tokens`` tokens at a time. Where logits do not exist yet, ``fused_logprobs`` never makes them.

    Args:
        logits: (N, V_local), possibly with columns of padding at the end of the vocabulary.
        targets: (N,) int64, global token ids; any valid id where the token is masked.
        temperatures: (N,) positive, the logits are divided by them.
        vocab_start: global id of the first column.
        vocab_size: true size of the whole vocabulary; columns at or beyond it never enter a log-sum-exp.
        all_reduce_max, all_reduce_sum: reduce a tensor in place over the tensor-parallel group; needed where ``logits``
            do not have the whole vocabulary's columns.
        chunk_tokens: tokens whose softmax exists at once.

    Returns:
        Logprobs and entropies, (N,) float32 (float64 for float64 logits), differentiable with respect to ``logits``.

    Raises:
        ValueError: what is no tensor, shapes that do not fit, a target outside the vocabulary, a temperature that is
            not positive, a part of the vocabulary without reductions, a chunk below 1.
    """
    require_tensors(logits=logits, targets=targets)
    require_temperatures(temperatures)
    if not logits.is_floating_point():
        raise ValueError(f"logits are {logits.dtype}; give floats")
    if logits.ndim != 2 or not targets.shape == temperatures.shape == logits.shape[:1]:
        raise ValueError(
            f"logits {tuple(logits.shape)}, targets {tuple(targets.shape)} and temperatures "
            f"{tuple(temperatures.shape)} do not fit; give (N, V), (N,), (N,)"
        )
    shard = VocabularyShard.of(targets, logits.shape[1], vocab_start, vocab_size, chunk_tokens)
    shard.require_reductions(vocab_size, all_reduce_max, all_reduce_sum)
    return _VocabParallelLogprobs.apply(logits, targets, temperatures, shard, all_reduce_max, all_reduce_sum)


class _VocabParallelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        temperatures: Tensor,
        shard: VocabularyShard,
        all_reduce_max: Reduce,
        all_reduce_sum: Reduce,
    ) -> tuple[Tensor, Tensor]:
        dtype = compute_dtype(logits.dtype)
        maximum, sums = local_sums(
            shard,
            targets,
            dtype,
            lambda part, column: chunk_sums(_scaled(logits, temperatures, part, shard.columns, dtype), column),
        )
        maximum, log_total, entropy, logprobs = (
            combine_shards(maximum, sums, all_reduce_max, all_reduce_sum) if targets.numel() else (sums[0],) * 4
        )
        ctx.save_for_backward(logits, targets, temperatures, maximum, log_total, entropy)
        ctx.shard = shard
        ctx.set_materialize_grads(False)
        return logprobs.clone(), entropy.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, targets, temperatures, maximum, log_total, entropy = ctx.saved_tensors
        shard, (grad_logprobs, grad_entropy) = ctx.shard, grads
        grad_logits = torch.zeros_like(logits)
        weight = torch.zeros_like(log_total) if grad_logprobs is None else grad_logprobs
        for part in shard.parts(targets.numel()) if shard.columns else []:
            x = _scaled(logits, temperatures, part, shard.columns, log_total.dtype)
            own_entropy = None if grad_entropy is None else grad_entropy[part]
            dx = softmax_gradient(
                x, maximum[part], log_total[part], entropy[part], weight[part], own_entropy, overwrite=True
            )
            column, held = shard.local(targets[part])
            dx.scatter_add_(1, column[:, None], weight[part].masked_fill(~held, 0.0)[:, None])
            grad_logits[part, : shard.columns] = dx.div_(temperatures[part].to(dx.dtype)[:, None]).to(logits.dtype)
        return grad_logits, *(None,) * 5


def _scaled(logits: Tensor, temperatures: Tensor, part: slice, columns: int, dtype: torch.dtype) -> Tensor:
    return logits[part, :columns].to(dtype) / temperatures[part].to(dtype)[:, None]
