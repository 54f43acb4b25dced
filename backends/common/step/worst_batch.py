"""The micro-batches that need the most memory within the run's limits of lengths and tokens."""

from dataclasses import replace

import torch

from slime_like.algorithms.context import Layout, padded_length
from slime_like.algorithms.packing.pack import pack_sequences
from slime_like.config import RunConfig
from slime_like.trajectory import PackedTrajectory, ScoredTrajectory


def worst_packs(config: RunConfig, layout: Layout) -> list[PackedTrajectory]:
    """Return packs that fill ``trainer.target_tokens_per_batch``. One of them needs the most memory.

    Layers' memory depends on the number of tokens, the head's on the number of responses: the first pack has the
    shortest prompts and the longest responses. If keys are gathered, a rank also keeps keys of the sequence that
    continues from earlier ranks, so a second pack has the longest sequences. If samples share their prompt, the last
    pack has groups with the longest prompts.
    """
    budget, context = config.trainer.target_tokens_per_batch, config.trainer.parallel.context
    response = budget - 1 if config.supervised else config.rollout.max_new_tokens
    prompts = [1] if layout == "zigzag" or context == 1 else [1, config.data.max_prompt_tokens]
    width = 0 if config.supervised else max(0, config.rollout.bounded_top_k)
    packs = [_filled(budget, prompt, response, context, layout, width) for prompt in prompts]
    if config.trainer.share_prefixes and not config.supervised:
        samples = config.rollout.samples_per_prompt
        packs.append(_filled_with_groups(budget, config.data.max_prompt_tokens, response, samples, width))
    for pack in packs if config.algorithm.needs_critic else ():
        pack.values, pack.returns = torch.zeros(2, len(pack.targets)).unbind()
    return packs


def attention_length(pack: PackedTrajectory) -> int:
    """Return the length of separate sequences whose attention would cost as much per token; the longest one's if
    nothing is shared."""
    if pack.segment_parents is None or pack.segment_lengths is None:
        return pack.max_seqlen
    lengths, before, pairs = pack.segment_lengths.tolist(), list[int](), 0
    for parent, length in zip(pack.segment_parents.tolist(), lengths, strict=True):
        before.append(0 if parent < 0 else before[parent] + lengths[parent])
        pairs += length * (2 * before[-1] + length)
    return round(pairs / sum(lengths))


def _filled(budget: int, prompt: int, response: int, context: int, layout: Layout, width: int) -> PackedTrajectory:
    """Fill a pack with as many sequences as fit, and one for the rest of the budget. The layout's padding counts.

    ``width`` is the width of truncated sampling's supports; 0 means none.
    """
    sequences: list[ScoredTrajectory] = []
    room = budget
    while room >= 2:
        length = min(prompt + response, room)
        if padded_length(length, context, layout) > room:
            length = room // (2 * context) * (2 * context)
        if length < 2:
            break
        prompt_length = min(prompt, length - 1)
        sequences.append(_sequence(len(sequences), prompt_length, length - prompt_length, width))
        room -= padded_length(length, context, layout)
    return pack_sequences(sequences)


def _filled_with_groups(budget: int, prompt: int, response: int, samples: int, width: int) -> PackedTrajectory:
    """Fill a pack with as many samples as fit, each group's prompt once, and one for the rest of the budget."""
    sequences: list[ScoredTrajectory] = []
    room = budget
    while True:
        group, is_first = len(sequences) // samples, len(sequences) % samples == 0
        length = min(response, room - prompt * is_first)
        if length < 1:
            return pack_sequences(sequences, sharing="prompts")
        sequences.append(replace(_sequence(len(sequences), prompt, length, width), group_id=group))
        room -= length + prompt * is_first


def _sequence(index: int, prompt: int, response: int, width: int) -> ScoredTrajectory:
    tokens = torch.zeros(prompt + response, dtype=torch.int64)
    return replace(
        ScoredTrajectory.unrewarded(f"worst-{index}", tokens[:prompt], tokens[prompt:], group_id=index),
        logprobs=torch.zeros(response),
        old_logprobs=torch.zeros(response),
        ref_logprobs=torch.zeros(response),
        support_ids=torch.zeros(response * width, dtype=torch.int32) if width else None,
        support_sizes=torch.full((response,), width, dtype=torch.int32) if width else None,
    )
