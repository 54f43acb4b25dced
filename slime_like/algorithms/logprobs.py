"""Log-probabilities and entropies, in chunks of tokens, recomputed in backward.

Float32 logits or a softmax of the whole [T, V] are never kept. Forward saves a maximum, the log-sum-exp above it and an
entropy per token; backward recomputes each chunk's softmax. A logprob is the same everywhere: the log-softmax of the
temperature-scaled logits over the whole vocabulary.
"""

import math

import torch
from torch import Tensor

from slime_like.algorithms.head import FusedLogprobs
from slime_like.algorithms.packing.pack import response_logit_index, response_tokens
from slime_like.algorithms.segments import expanded_temperatures, require_alike, require_known_targets
from slime_like.algorithms.softmax import VocabularyShard
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
    return logprobs_and_entropy(logits, targets)[0]


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
    require_alike(targets=targets, logits=logits[..., 0])
    require_known_targets(targets, logits.shape[-1])
    scale = None if temperatures is None else expanded_temperatures(temperatures, targets).reshape(-1)
    columns = logits.shape[-1]
    elements = _CPU_CHUNK_ELEMENTS if logits.device.type == "cpu" else _DEVICE_CHUNK_ELEMENTS
    whole = VocabularyShard(0, columns, max(1, elements // columns))
    flat = logits.reshape(-1, columns)
    logprobs, entropy = FusedLogprobs.apply(flat, None, targets.reshape(-1), scale, whole, None, None)
    return logprobs.view(targets.shape), entropy.view(targets.shape)


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
    index, divisors = response_logit_index(packed), torch.ones_like(packed.tokens, dtype=torch.float64)
    divisors[index] = _temperatures(packed, temperature)
    targets = torch.full_like(packed.tokens, -1).index_copy(0, index, response_tokens(packed))
    return logprobs_and_entropy(logits, targets, divisors)[0][index]


def _temperatures(packed: PackedTrajectory, temperature: float | None) -> Tensor:
    """Return (R,) float64 divisors of the logits."""
    per_token = packed.temperatures.repeat_interleave(packed.response_lens, output_size=packed.targets.numel())
    if temperature is None:
        return per_token.to(torch.float64)
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature={temperature} cannot scale logits; give a positive one (1 for greedy samples)")
    for sequence_id, sampled in zip(packed.sequence_ids, packed.temperatures.tolist(), strict=True):
        if sampled not in (1.0, temperature):
            raise ValueError(
                f"sequence {sequence_id!r} was sampled at temperature {sampled}, but temperature={temperature}; give "
                "temperature=None for each sequence's own, or a pack with other `temperatures` if this is intended"
            )
    return torch.full_like(per_token, temperature, dtype=torch.float64)
