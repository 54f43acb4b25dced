"""Log-probabilities and entropies, in chunks of tokens, recomputed in backward.

Float32 logits or a softmax of the whole [T, V] are never kept. Forward saves a maximum, the log-sum-exp above it and an
entropy per token; backward recomputes each chunk's softmax. A logprob is the same everywhere: the log-softmax of the
temperature-scaled logits over the whole vocabulary.
"""

import math
from typing import Any

import torch
from torch import Tensor

from slime_like.algorithms.packing.pack import response_logit_index, response_tokens
from slime_like.algorithms.segments import expanded_temperatures, require_alike, require_known_targets
from slime_like.algorithms.softmax import Sums, VocabularyShard, compute_dtype, logit_gradient, row_sums
from slime_like.trajectory import PackedTrajectory

# Elements of one chunk of logits. On a CPU, a chunk and its scratch space should fit into the cache.
_CPU_CHUNK_ELEMENTS = 1 << 17
_DEVICE_CHUNK_ELEMENTS = 1 << 25


def selective_log_softmax(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute the log-softmax of ``logits`` at ``targets`` without a [T, V] temporary.

    Args:
        logits: (..., V).
        targets: (...) int64; a negative target (an ``ignore_index``) gives logprob 0 and no gradient.

    Returns:
        (...) float32, or float64 for float64 logits.

    Raises:
        ValueError: shapes don't fit, or a target isn't below V.

    Example:
        >>> selective_log_softmax(torch.zeros(2, 8), torch.tensor([0, -100]))
        tensor([-2.0794,  0.0000])
    """
    return _select(logits, targets, None, with_entropy=False)[0]


def logprobs_and_entropy(
    logits: Tensor, targets: Tensor, temperatures: Tensor | float | None = None
) -> tuple[Tensor, Tensor]:
    """Compute logprobs of ``targets`` and entropies (nats) in one pass over chunks; both differentiable.

    Args:
        logits: (..., V).
        targets: (...) int64; a negative target gives logprob 0 without gradient, but still an entropy.
        temperatures: positive divisors of the logits: a number, or a tensor that expands to (...); 1 by default.

    Returns:
        Logprobs and entropies, (...) float32, or float64 for float64 logits.

    Raises:
        ValueError: shapes don't fit, a target isn't below V, or a temperature isn't positive.
    """
    return _select(logits, targets, temperatures, with_entropy=True)


def compute_response_logprobs(logits: Tensor, packed: PackedTrajectory, temperature: float | None = 1.0) -> Tensor:
    """Compute the logprob of every response token of a pack, including masked ones.

    Args:
        logits: (T, V), the model's output for ``packed.tokens``.
        packed: the pack.
        temperature: divisor of all logits, or ``None`` to divide each sequence's logits by its temperature. A number
            must be the temperature that every sequence was sampled at, except for those at 1, the default.

    Returns:
        (R,) float32 (float64 for float64 logits): entry i belongs to response token i of the pack.

    Raises:
        ValueError: ``logits`` don't have one row per token of the pack, the temperature isn't positive, or a sequence
            was sampled at another one.
    """
    if logits.ndim != 2 or logits.shape[0] != packed.packed_seq_len:
        raise ValueError(
            f"logits have shape {tuple(logits.shape)}, the pack has {packed.packed_seq_len} tokens; give (T, V)"
        )
    scale, targets = _scale(packed, temperature), response_tokens(packed)
    require_known_targets(targets, logits.shape[-1])
    return _Scored.apply(logits, targets, scale, response_logit_index(packed), _whole(logits), False)[0]


def _scale(packed: PackedTrajectory, temperature: float | None) -> Tensor | None:
    """Return (R,) float64 divisors of the logits, or ``None`` if all are 1."""
    if temperature is None:
        per_token = packed.temperatures.repeat_interleave(packed.response_lens, output_size=packed.targets.numel())
        return per_token.to(torch.float64)
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature={temperature} cannot scale logits; give a positive one (1 for greedy samples)")
    for sequence_id, sampled in zip(packed.sequence_ids, packed.temperatures.tolist(), strict=True):
        if sampled not in (1.0, temperature):
            raise ValueError(
                f"sequence {sequence_id!r} was sampled at temperature {sampled}, but temperature={temperature}; give "
                "temperature=None for each sequence's own, or a pack with other `temperatures` if this is intended"
            )
    shape = packed.targets.shape
    return None if temperature == 1.0 else packed.temperatures.new_full(shape, temperature, dtype=torch.float64)


def _select(
    logits: Tensor, targets: Tensor, temperatures: Tensor | float | None, with_entropy: bool
) -> tuple[Tensor, Tensor]:
    require_alike(targets=targets, logits=logits[..., 0])
    require_known_targets(targets, logits.shape[-1])
    scale = None if temperatures is None else expanded_temperatures(temperatures, targets).reshape(-1)
    flat = logits.reshape(-1, logits.shape[-1])
    logprobs, entropy = _Scored.apply(flat, targets.reshape(-1), scale, None, _whole(flat), with_entropy)
    return logprobs.view(targets.shape), entropy.view(targets.shape)


def _whole(logits: Tensor) -> VocabularyShard:
    elements = _CPU_CHUNK_ELEMENTS if logits.device.type == "cpu" else _DEVICE_CHUNK_ELEMENTS
    return VocabularyShard(0, logits.shape[-1], max(1, elements // logits.shape[-1]))


class _Scored(torch.autograd.Function):
    """Scores of (T, V) logits, or only of ``rows``, at (N,) targets. Backward calls no reduction."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        targets: Tensor,
        temperatures: Tensor | None,
        rows: Tensor | None,
        shard: VocabularyShard,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = compute_dtype(logits.dtype)

        def sums_of(part: slice, column: Tensor) -> tuple[Tensor, Sums]:
            x = _scaled_rows(logits, rows, part, temperatures, dtype)
            if with_entropy:
                return row_sums(x, column, overwrite=temperatures is not None)
            maximum = x.amax(1)
            total = torch.sub(x, maximum[:, None]).exp_().sum(1)
            return maximum, (total, 0.0, x.gather(1, column[:, None]).squeeze(1))

        maximum, log_total, entropy, logprobs = shard.scores(targets, dtype, sums_of)
        ctx.save_for_backward(logits, targets, temperatures, rows, maximum, log_total, entropy)
        ctx.shard = shard
        ctx.set_materialize_grads(False)
        entropy = entropy.clone()
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, targets, temperatures, rows, *softmax = ctx.saved_tensors
        shard: VocabularyShard = ctx.shard
        all_written = rows is None and any(grad is not None for grad in grads)
        grad_logits = torch.empty_like(logits) if all_written else torch.zeros_like(logits)
        for part, given in shard.gradients(targets, softmax, grads):
            scale = None if temperatures is None else temperatures[part]
            x = _scaled_rows(logits, rows, part, temperatures, softmax[1].dtype)
            dx = logit_gradient(x, scale, *given, overwrite=temperatures is not None)
            grad_logits[part if rows is None else rows[part]] = dx.to(grad_logits.dtype)
        return grad_logits, *(None,) * 5


def _scaled_rows(
    logits: Tensor, rows: Tensor | None, part: slice, temperatures: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Return (n, V) scaled logits in the computing dtype. Without temperatures they may be a view: don't write."""
    x = logits[part if rows is None else rows[part]].to(dtype)
    return x if temperatures is None else x / temperatures[part].to(dtype)[:, None]
