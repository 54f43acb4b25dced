"""The micro-batches that need most memory, within the run's limits of lengths and tokens."""

from dataclasses import replace

import torch

from slime_like.algorithms.context import Layout, padded_length
from slime_like.algorithms.packing.pack import pack_sequences
from slime_like.config import RunConfig
from slime_like.trajectory import PackedTrajectory, ScoredTrajectory


def worst_packs(config: RunConfig, layout: Layout) -> list[PackedTrajectory]:
    """Packs that fill ``trainer.target_tokens_per_batch``; one of them needs most.

    What layers keep depends on the number of tokens, what the head needs on that of responses: the first pack has the
    shortest prompts and the longest responses. Where keys are gathered, a rank also keeps those of the sequence that
    reaches in from earlier ranks: there a second pack has the longest sequences.
    """
    budget, context = config.trainer.target_tokens_per_batch, config.trainer.parallel.context
    response = budget - 1 if config.supervised else config.rollout.max_new_tokens
    prompts = [1] if layout == "zigzag" or context == 1 else [1, config.data.max_prompt_tokens]
    return [_filled(budget, prompt, response, context, layout) for prompt in prompts]


def _filled(budget: int, prompt: int, response: int, context: int, layout: Layout) -> PackedTrajectory:
    """As many sequences as fit, and the rest of the budget as one more. Padding that the layout adds counts."""
    sequences: list[ScoredTrajectory] = []
    room = budget
    while room >= 2:
        length = min(prompt + response, room)
        if padded_length(length, context, layout) > room:
            length = room // (2 * context) * (2 * context)
        if length < 2:
            break
        prompt_length = min(prompt, length - 1)
        sequences.append(_sequence(len(sequences), prompt_length, length - prompt_length))
        room -= padded_length(length, context, layout)
    return pack_sequences(sequences)


def _sequence(index: int, prompt: int, response: int) -> ScoredTrajectory:
    tokens = torch.zeros(prompt + response, dtype=torch.int64)
    return replace(
        ScoredTrajectory.unrewarded(f"worst-{index}", tokens[:prompt], tokens[prompt:], group_id=index),
        logprobs=torch.zeros(response),
        old_logprobs=torch.zeros(response),
        ref_logprobs=torch.zeros(response),
    )
