"""Log-probabilities and entropies, in chunks of tokens, recomputed in backward.

Neither logits in float32 nor a softmax of the whole [T, V] is ever kept: forward saves a maximum, the log-sum-exp above
it and an entropy per token, backward computes each chunk's softmax again. A logprob means the same everywhere:
log-softmax of the temperature-scaled logits over the whole vocabulary.
"""

import math
from typing import Any

import torch
from torch import Tensor

from slime_like.algorithms.masks import require_temperatures
from slime_like.algorithms.packing.pack import response_logit_index, response_tokens
from slime_like.algorithms.tensor_checks import require_logits, require_targets, require_tensors
from slime_like.trajectory import PackedTrajectory

# Elements of one chunk of logits. On a CPU a chunk and its scratch should stay in the cache; an accelerator wants work.
_CPU_CHUNK_ELEMENTS = 1 << 17
_DEVICE_CHUNK_ELEMENTS = 1 << 25

# exp of it, and of anything below, is 0 in float64 too.
_LEAST_SHIFT = -1000.0


def selective_log_softmax(logits: Tensor, targets: Tensor) -> Tensor:
    """Log-softmax of ``logits`` at ``targets`` without a [T, V] temporary.

    Args:
        logits: (..., V).
        targets: (...) int64; a negative target (an ``ignore_index``) gives logprob 0 and no gradient.

    Returns:
        (...) float32, or float64 for float64 logits.

    Raises:
        ValueError: what is no tensor, shapes that do not fit, no vocabulary, logits that are no floats, targets that
            are no integers, or one that is not below V.

    Example:
        >>> selective_log_softmax(torch.zeros(2, 8), torch.tensor([0, -100]))
        tensor([-2.0794,  0.0000])
    """
    return _select(logits, targets, None, with_entropy=False)[0]


def logprobs_and_entropy(logits: Tensor, targets: Tensor, temperatures: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Logprob of ``targets`` and entropy (nats) of every token, in one pass over chunks; both differentiable.

    Args:
        logits: (..., V).
        targets: (...) int64; a negative target gives logprob 0 without gradient (its entropy is still computed).
        temperatures: (...) positive, or a shape that expands to it: what the logits are divided by; none means 1.

    Returns:
        Logprobs and entropies, (...) float32, or float64 for float64 logits.

    Raises:
        ValueError: what is no tensor, shapes that do not fit, no vocabulary, logits that are no floats, targets that
            are no integers, one that is not below V, or a temperature that is not positive.

    Example:
        >>> logprobs, entropy = logprobs_and_entropy(logits, targets, torch.tensor(0.7))
    """
    return _select(logits, targets, temperatures, with_entropy=True)


def compute_response_logprobs(logits: Tensor, packed: PackedTrajectory, temperature: float | None = 1.0) -> Tensor:
    """Logprob of every response token of a pack, masked ones included.

    A logprob belongs to a temperature, the one that sampled. So a number serves only packs that do not say otherwise:
    whose sequences' temperatures are that number, or 1, which is also what a trajectory says that says nothing.

    Args:
        logits: (T, V), the model's output for ``packed.tokens``.
        packed: the pack.
        temperature: the logits of all sequences are divided by it; ``None``: those of each sequence by its own,
            ``packed.temperatures``.

    Returns:
        (R,) float32 (float64 for float64 logits): entry i belongs to response token i of the pack.

    Raises:
        ValueError: ``logits`` do not have one row per token of the pack, the temperature is not positive, or a sequence
            was sampled at another one.

    Example:
        >>> compute_response_logprobs(logits, packed, temperature=None)
    """
    require_tensors(logits=logits)
    if logits.ndim != 2 or logits.shape[0] != packed.packed_seq_len:
        raise ValueError(
            f"logits have shape {tuple(logits.shape)}, the pack has {packed.packed_seq_len} tokens; give (T, V)"
        )
    scale, targets = _scale(packed, temperature), response_tokens(packed)
    _check_scoring(logits, targets)
    return _SelectiveLogSoftmax.apply(logits, targets, scale, response_logit_index(packed), False)[0]


def _scale(packed: PackedTrajectory, temperature: float | None) -> Tensor | None:
    """(R,) float64 divisors of the logits; ``None`` where all are 1."""
    if temperature is None:
        require_temperatures(packed.temperatures)
        per_token = packed.temperatures.repeat_interleave(packed.response_lens, output_size=packed.targets.numel())
        return per_token.to(torch.float64)
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature={temperature} cannot scale logits; give a positive one (1 for greedy samples)")
    for sequence_id, sampled in zip(packed.sequence_ids, packed.temperatures.tolist(), strict=True):
        if sampled not in (1.0, temperature):
            raise ValueError(
                f"sequence {sequence_id!r} was sampled at temperature {sampled}, and would be scored at {temperature}; "
                "give temperature=None for each sequence's own, or a pack with other `temperatures` to mean it"
            )
    shape = packed.targets.shape
    return None if temperature == 1.0 else packed.temperatures.new_full(shape, temperature, dtype=torch.float64)


def _check_scoring(logits: Tensor, targets: Tensor) -> None:
    """Reject inputs that a kernel would index out of range, or not check at all."""
    require_logits(logits)
    require_targets(targets)
    if targets.numel() and int(targets.max()) >= logits.shape[-1]:
        raise ValueError(
            f"targets reach up to {int(targets.max())}, logits have {logits.shape[-1]} columns; give the whole "
            "vocabulary's"
        )


def _select(logits: Tensor, targets: Tensor, temperatures: Tensor | None, with_entropy: bool) -> tuple[Tensor, Tensor]:
    require_tensors(logits=logits, targets=targets)
    if logits.ndim < 1 or logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"targets have shape {tuple(targets.shape)}, logits {tuple(logits.shape)}; give (...) and (..., V)"
        )
    _check_scoring(logits, targets)
    scale = None if temperatures is None else _expanded(temperatures, targets)
    flat = logits.reshape(-1, logits.shape[-1])
    logprobs, entropy = _SelectiveLogSoftmax.apply(flat, targets.reshape(-1), scale, None, with_entropy)
    return logprobs.view(targets.shape), entropy.view(targets.shape)


def _expanded(temperatures: Tensor, targets: Tensor) -> Tensor:
    require_temperatures(temperatures)
    try:
        return temperatures.expand(targets.shape).reshape(-1)
    except RuntimeError as error:
        raise ValueError(
            f"temperatures have shape {tuple(temperatures.shape)}, targets {tuple(targets.shape)}; give one per target"
        ) from error


def _chunk_rows(logits: Tensor) -> int:
    elements = _CPU_CHUNK_ELEMENTS if logits.device.type == "cpu" else _DEVICE_CHUNK_ELEMENTS
    return max(1, elements // max(1, logits.shape[-1]))


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 stays, everything else is computed and accumulated in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class _SelectiveLogSoftmax(torch.autograd.Function):
    """Rows of (T, V) logits (all of them, or ``rows``) scored at (N,) targets."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, temperatures: Tensor | None, rows: Tensor | None, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        dtype = compute_dtype(logits.dtype)
        count = targets.numel()
        maximum, log_total, logprobs, entropy = (
            torch.zeros(count, dtype=dtype, device=logits.device) for _ in range(4)
        )
        step = _chunk_rows(logits)
        for start in range(0, count, step):
            part = slice(start, min(start + step, count))
            x = _scaled_rows(logits, rows, part, temperatures, dtype)
            target = targets[part]
            picked = x.gather(1, target.clamp_min(0)[:, None]).squeeze(1)
            if with_entropy:
                maximum[part], total, product = row_sums(x)
                log_total[part] = total.log()
                entropy[part] = log_total[part] - product / total
            else:
                maximum[part], total = row_maximum_and_sum(x)
                log_total[part] = total.log()
            logprobs[part] = (picked - maximum[part] - log_total[part]).masked_fill_(target < 0, 0.0)
        ctx.save_for_backward(logits, targets, temperatures, rows, maximum, log_total, entropy)
        ctx.set_materialize_grads(False)
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None, None, None, None]:
        logits, targets, temperatures, rows, maximum, log_total, entropy = ctx.saved_tensors
        grad_logprobs, grad_entropy = grads
        grad_logits = torch.empty_like(logits) if rows is None else torch.zeros_like(logits)
        if grad_logprobs is None and grad_entropy is None:
            return grad_logits.zero_(), None, None, None, None
        ignored = targets < 0
        weight = torch.zeros_like(log_total) if grad_logprobs is None else grad_logprobs.masked_fill(ignored, 0.0)
        step = _chunk_rows(logits)
        for start in range(0, targets.numel(), step):
            part = slice(start, min(start + step, targets.numel()))
            x = _scaled_rows(logits, rows, part, temperatures, log_total.dtype)
            dx = softmax_gradient(
                x,
                maximum[part],
                log_total[part],
                entropy[part],
                weight[part],
                None if grad_entropy is None else grad_entropy[part],
            )
            dx.scatter_add_(1, targets[part].clamp_min(0)[:, None], weight[part][:, None])
            if temperatures is not None:
                dx.div_(temperatures[part].to(dx.dtype)[:, None])
            if rows is None:
                grad_logits[part] = dx
            else:
                grad_logits[rows[part]] = dx.to(grad_logits.dtype)
        return grad_logits, None, None, None, None


def _scaled_rows(
    logits: Tensor, rows: Tensor | None, part: slice, temperatures: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """(n, V) temperature-scaled logits in the computing precision; may be a view of the input: not to be written to."""
    x = (logits[part] if rows is None else logits[rows[part]]).to(dtype)
    return x if temperatures is None else x / temperatures[part].to(dtype)[:, None]


def row_sums(x: Tensor, overwrite: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return of every row of (n, V) its maximum m, sum of exp(x - m), and sum of exp(x - m) (x - m).

    With ``overwrite`` the memory of ``x`` is used for scratch.
    """
    maximum = x.amax(1)
    shifted = torch.sub(x, maximum[:, None], out=x if overwrite else None)
    weights = shifted.exp()
    total = weights.sum(1)
    # A forbidden token (-inf) has weight 0; the product must be 0 too, not nan.
    return maximum, total, shifted.clamp_min_(torch.finfo(x.dtype).min).mul_(weights).sum(1)


def row_maximum_and_sum(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return of every row of (n, V) its maximum m, and sum of exp(x - m)."""
    maximum = x.amax(1)
    return maximum, torch.sub(x, maximum[:, None]).exp_().sum(1)


def softmax_gradient(
    x: Tensor,
    maximum: Tensor,
    log_total: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    overwrite: bool = False,
) -> Tensor:
    """Gradient of logprob and entropy with respect to (n, V) scaled logits, without the target's own +1 term.

    ``d logprob = onehot - p`` and ``d H = -p (log p + H)``. The log-sum-exp comes as the maximum and what it is above
    it: where logits are large, their sum is rounded to a multiple of 1e-5 and more, and every probability with it.
    With ``overwrite`` the result takes the memory of ``x``.
    """
    shifted = torch.sub(x, maximum[:, None], out=x if overwrite else None)
    per_weight = (-log_total).exp()  # p = per_weight * exp(shifted), log p = shifted - log_total
    if grad_entropy is None:
        return shifted.exp_().mul_((-grad_logprobs * per_weight)[:, None])
    weights = shifted.exp()
    constant = grad_entropy * (log_total - entropy) - grad_logprobs
    # A forbidden token (-inf) has weight 0; what it is multiplied by has to be finite, whatever the gradient.
    shifted.clamp_min_(_LEAST_SHIFT).mul_((-grad_entropy * per_weight)[:, None])
    return shifted.add_((constant * per_weight)[:, None]).mul_(weights)
