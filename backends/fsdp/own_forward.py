"""Check of the replaced attention and head against the model's unchanged forward pass, when a trainer starts.

A pack of a few short sequences goes through packed attention and the chunked head, and each of them by itself through
the model as transformers computes it, with its masks and logits: logits that are scaled on the way show, and
positions that are not counted from the sequence's beginning. The pack goes through once more with other tokens in its
first sequence, which the others must not notice: layers that mix neighbours by something else than transformers'
attention interface show, convolutions and recurrences above all.
"""

import torch
from torch import Tensor

from slime_like.algorithms.packing.pack import pack_sequences
from slime_like.errors import ConfigError
from slime_like.trajectory import PackedTrajectory, ScoredTrajectory

LENGTHS = ((3, 14), (1, 6), (9, 8))
"""Prompt and response tokens."""

BOUNDS = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.25}
"""Largest mean difference of logprobs (nats). In 16 bits two ways to compute one function differ by some hundredths."""


LEAKS = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.05}
"""Largest difference of any logprob (nats) between two packs that differ in another sequence; shapes are the same."""


def probe(vocab_size: int, reach: int | None, seed: int = 0) -> PackedTrajectory:
    """The sequences, the same on every rank; none is longer than ``reach``. ``seed`` makes the first one's tokens."""
    most = max(2, reach or max(map(sum, LENGTHS)))
    lengths = [(min(prompt, most - 1), min(response, most - min(prompt, most - 1))) for prompt, response in LENGTHS]
    generators = [torch.Generator().manual_seed(index or seed + len(lengths)) for index in range(len(lengths))]
    sequences = []
    for index, (pair, generator) in enumerate(zip(lengths, generators, strict=True)):
        prompt, response = (torch.randint(vocab_size, (length,), generator=generator) for length in pair)
        sequences.append(ScoredTrajectory.unrewarded(f"probe-{index}", prompt, response, group_id=index))
    return pack_sequences(sequences)


def response_logprobs(logits: Tensor, tokens: Tensor, prompt_len: int) -> Tensor:
    """(response_len,) from a sequence's own (T, V) logits."""
    distribution = logits.float().log_softmax(dim=-1)[prompt_len - 1 : -1]
    return distribution.gather(1, tokens[prompt_len:, None]).squeeze(1)


def require_same(ours: Tensor, reference: Tensor, dtype: torch.dtype, path: object) -> None:
    """Refuse a model that this backend would compute otherwise than transformers does."""
    gap, bound = float((ours.double() - reference.double()).abs().mean()), BOUNDS[dtype]
    _require_below(
        gap,
        bound,
        f"model.path={path}: trainer.backend=fsdp computes logprobs that differ from those of transformers' own "
        f"forward pass by {gap:.3g} nats in the mean (allowed: {bound:g}); its attention or head is of a kind that "
        "packs do not admit, so use another model",
    )


def require_separate(ours: Tensor, others: Tensor, first: int, dtype: torch.dtype, path: object) -> None:
    """Refuse a model in which a sequence of a pack notices the one before it.

    Args:
        ours, others: (R,) logprobs of two packs that differ in the first sequence alone.
        first: response tokens of that sequence.
    """
    gap = float((ours.double() - others.double())[first:].abs().max())
    _require_below(
        gap,
        LEAKS[dtype],
        f"model.path={path}: in its layers a sequence notices the one before it in a micro-batch (logprobs change by "
        f"{gap:.3g} nats), as with convolutions or recurrences over tokens, which trainer.backend=fsdp does not cut at "
        "boundaries; use another model",
    )


def _require_below(gap: float, bound: float, problem: str) -> None:
    if not gap <= bound:  # NaN is no agreement either
        raise ConfigError([problem])
