"""Make the data of a step: packs of sequences of different lengths, and the same sequences padded."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slime_like.algorithms import pack_sequences, partition_by_tokens
from slime_like.examples.tiny_model import VOCAB_SIZE
from slime_like.models.dimensions import ModelDimensions
from slime_like.trajectory import PackedTrajectory, ScoredTrajectory

QUICKSTART_BUDGET = 8192
_QUICKSTART_SEQUENCES, _QUICKSTART_PROMPT, _QUICKSTART_RESPONSES = 256, 10, (2, 9)
_SHORTEST, _LONGEST = 16, 4
"""Sequences take a sixteenth to a quarter of a full pack; a quarter of each is its prompt."""
_GROUP = 8


@dataclass(frozen=True, slots=True)
class PaddedBatch:
    """Sequences as rows, padded at the end.

    Attributes:
        tokens: (B, L) int64.
        rows: (R,) int64, indices into the flattened (B * L) axis whose logits score a response token.
        targets: (R,) int64, the response tokens.
        advantages: (R,) float32.
    """

    tokens: Tensor
    rows: Tensor
    targets: Tensor
    advantages: Tensor


def quickstart_packs() -> list[PackedTrajectory]:
    """Return a minibatch of the quickstart's shape: many short sequences in one or few packs."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(*_QUICKSTART_RESPONSES, (_QUICKSTART_SEQUENCES,), generator=generator).tolist()
    prompt = _QUICKSTART_PROMPT
    sequences = [_sequence(index, prompt, length, VOCAB_SIZE, generator) for index, length in enumerate(lengths)]
    (replica,) = partition_by_tokens([s.total_len for s in sequences], QUICKSTART_BUDGET, 1)
    return [pack_sequences([sequences[index] for index in micro_batch]) for micro_batch in replica]


def full_packs(tokens: int, count: int, vocab_size: int) -> list[PackedTrajectory]:
    """Return ``count`` packs of ``tokens`` tokens without padding: uniform lengths, the last one fills the pack."""
    generator = torch.Generator().manual_seed(0)
    packs = []
    for pack in range(count):
        lengths = _filling_lengths(tokens, generator)
        pairs = [(max(1, length // 4), length - max(1, length // 4)) for length in lengths]
        packs.append(
            pack_sequences(
                [
                    _sequence(1000 * pack + index, prompt, response, vocab_size, generator)
                    for index, (prompt, response) in enumerate(pairs)
                ]
            )
        )
    return packs


def pack_of_one(dimensions: ModelDimensions, tokens: int) -> list[PackedTrajectory]:
    """Return a pack of one sequence; a quarter of it is the prompt."""
    generator = torch.Generator().manual_seed(0)
    return [pack_sequences([_sequence(0, tokens // 4, tokens - tokens // 4, dimensions.vocab_size, generator)])]


def group_pack(dimensions: ModelDimensions, prompt: int, response: int, shared: bool) -> list[PackedTrajectory]:
    """Return a pack of eight responses to one prompt, which it contains once if ``shared``."""
    generator = torch.Generator().manual_seed(0)
    group = [_sequence(index, prompt, response, dimensions.vocab_size, generator) for index in range(_GROUP)]
    alike = [replace(sequence, prompt_tokens=group[0].prompt_tokens) for sequence in group]
    return [pack_sequences(alike, sharing="prompts" if shared else None)]


def padded_batches(sequences: Sequence[ScoredTrajectory], budget: int) -> list[PaddedBatch]:
    """Batch the sequences in order; a batch padded to its longest sequence has at most ``budget`` tokens."""
    batches: list[list[ScoredTrajectory]] = []
    for sequence in sequences:
        grown = [*batches[-1], sequence] if batches else []
        if grown and len(grown) * max(each.total_len for each in grown) <= budget:
            batches[-1] = grown
        else:
            batches.append([sequence])
    return [_padded(batch) for batch in batches]


def _padded(sequences: Sequence[ScoredTrajectory]) -> PaddedBatch:
    longest = max(sequence.total_len for sequence in sequences)
    tokens = torch.zeros(len(sequences), longest, dtype=torch.int64)
    rows, advantages = [], []
    for row, sequence in enumerate(sequences):
        tokens[row, : sequence.total_len] = torch.cat([sequence.prompt_tokens, sequence.response_tokens])
        first = row * longest + sequence.prompt_len - 1
        rows.append(torch.arange(first, first + sequence.response_len))
        advantages.append(sequence.advantages.expand(sequence.response_len))
    targets = torch.cat([sequence.response_tokens for sequence in sequences])
    return PaddedBatch(tokens, torch.cat(rows), targets, torch.cat(advantages))


def _filling_lengths(tokens: int, generator: torch.Generator) -> list[int]:
    shortest, longest = max(2, tokens // _SHORTEST), max(3, tokens // _LONGEST)
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > longest:
        drawn = int(torch.randint(shortest, longest + 1, (), generator=generator))
        lengths.append(min(drawn, left - shortest))
    return [*lengths, left]


def _sequence(index: int, prompt: int, response: int, vocab_size: int, generator: torch.Generator) -> ScoredTrajectory:
    own_prompt = torch.randint(8, vocab_size, (prompt,), generator=generator)
    own_response = torch.randint(8, vocab_size, (response,), generator=generator)
    bare = ScoredTrajectory.unrewarded(f"s{index}", own_prompt, own_response, group_id=index // _GROUP)
    logprobs = -torch.rand(response, generator=generator)
    return replace(bare, logprobs=logprobs, advantages=torch.randn((), generator=generator))
