"""The batch of every layout: the same sequences, with the same frozen logprobs."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from slime_like.errors import DataError
from slime_like.interfaces import Scores
from slime_like.models.dimensions import ModelDimensions
from slime_like.trajectory import ScoredTrajectory

SYNTHETIC_BUDGET = 192
"""Token budget that splits the synthetic batch into several packs, one of them a single long sequence."""

_GROUP_SIZE = 4
# (prompt, response): a single response token; a long prompt, so its response is in one context rank's part; a long
# response; lengths that no 2 * context divides.
_LENGTHS = (
    (5, 9), (3, 1), (11, 6), (2, 17), (60, 2), (8, 21), (7, 3), (4, 12),
    (1, 30), (30, 31), (13, 7), (150, 33), (2, 5), (6, 64), (9, 9), (40, 1),
)  # fmt: skip
_FULLY_MASKED = 6


def synthetic_batch(dimensions: ModelDimensions, seed: int = 0) -> list[ScoredTrajectory]:
    """Return sixteen scored sequences of random tokens in groups of four, determined by vocabulary and seed."""
    generator = torch.Generator().manual_seed(seed)
    batch = []
    for index, (prompt, response) in enumerate(_LENGTHS):
        tokens = torch.randint(0, dimensions.vocab_size, (prompt + response,), generator=generator)
        loss_mask = torch.rand(response, generator=generator) < 0.85
        loss_mask[-1] = True
        if index == _FULLY_MASKED:
            loss_mask = torch.zeros_like(loss_mask)
        name, group = f"synthetic-{index}", index // _GROUP_SIZE
        bare = ScoredTrajectory.unrewarded(name, tokens[:prompt], tokens[prompt:], group_id=group)
        advantage = torch.randn((), generator=generator)
        temperature = (1.0, 0.7, 1.3)[index % 3]
        batch.append(replace(bare, loss_mask=loss_mask, advantages=advantage, temperature=temperature))
    return batch


def require_fit(sequences: Sequence[ScoredTrajectory], dimensions: ModelDimensions, source: str) -> None:
    """Check that this model can compute these sequences.

    Raises:
        DataError: there is no sequence, or one has ids or a length that the model does not support.
    """
    if not sequences:
        remedy = "keep another step's rollouts"
        raise DataError("holds no sequence", code="empty-dump", who=source, remedy=remedy)
    for sequence in sequences:
        highest = max(int(sequence.prompt_tokens.max()), int(sequence.response_tokens.max()))
        if highest >= dimensions.vocab_size:
            problem = f"has the id {highest}, but the model has ids 0 to {dimensions.vocab_size - 1}"
        elif sequence.total_len > (longest := dimensions.max_position_embeddings):
            problem = f"has {sequence.total_len} tokens, more than the model's max_position_embeddings={longest}"
        else:
            continue
        problem, remedy = f"sequence {sequence.sequence_id} {problem}", "give the model of these rollouts"
        raise DataError(problem, code="rollouts-of-another-model", who=source, remedy=remedy)


def with_frozen_logprobs(
    sequences: Sequence[ScoredTrajectory], scores: Sequence[Scores], seed: int = 0
) -> list[ScoredTrajectory]:
    """Add missing logprobs that the loss needs: the policy's logprobs plus noise from ``seed``.

    All layouts must get the same logprobs, so a fault in a layout's scoring does not carry over to its training.
    """
    generator = torch.Generator().manual_seed(seed)
    frozen = []
    for sequence, logprobs in zip(sequences, (score["old_logprobs"] for score in scores), strict=True):
        noisy = {
            name: logprobs + scale * torch.randn(len(logprobs), generator=generator)
            for name, scale in (("old_logprobs", 0.05), ("logprobs", 0.06), ("ref_logprobs", 0.2))
        }
        missing: dict[str, Any] = {name: values for name, values in noisy.items() if getattr(sequence, name) is None}
        frozen.append(replace(sequence, **missing))
    return frozen
