"""Compare packing with Python lists and with memcpy, and unpacking in one call with a loop."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.algorithms.measure import Row, best_times, time_rows
from slime_like.algorithms import pack_sequences, unpack_response_logprobs, unpack_sequences
from slime_like.trajectory import PackedTrajectory, ScoredTrajectory

LISTS = "python lists: tokens, masks, positions, advantages"
OURS = "pack_sequences, the same inputs"
LISTS_OF_ALL = "python lists: those, three logprobs, versions"
FEW = {"tokens": torch.long, "loss_mask": torch.int, "advantages": torch.float32}
LOGPROBS = {
    "logprobs": torch.float32,
    "old_logprobs": torch.float32,
    "ref_logprobs": torch.float32,
    "weight_versions": torch.long,
}
NUM_SEQUENCES, PROMPT_LEN, RESPONSE_LEN = 1000, 128, 384


def rows() -> list[Row]:
    """Measure with 1,000 sequences of 512 tokens."""
    sequences = [_trajectory(index) for index in range(NUM_SEQUENCES)]
    lists = [_as_lists(sequence) for sequence in sequences]
    packed = pack_sequences(sequences)
    nbytes = sum(tensor.nbytes for tensor in _tensors(packed))
    plain = [_without_logprobs(sequence) for sequence in sequences]
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)
    times = best_times(
        {
            LISTS: lambda: _pack_lists(lists, FEW),
            OURS: lambda: pack_sequences(plain),
            f"memcpy of the pack's {nbytes / 2**20:.0f} MiB": lambda: target.copy_(source),
        }
    )
    found = time_rows("pack 1,000 x 512 tokens", times, LISTS, {OURS: 20.0})
    times = best_times(
        {
            LISTS_OF_ALL: lambda: _pack_lists(lists, FEW | LOGPROBS),
            OURS: lambda: pack_sequences(sequences),
        }
    )
    found += time_rows("the same with three logprobs and versions", times, LISTS_OF_ALL, {OURS: 20.0})
    return found + _unpack_rows(packed, sequences)


def _unpack_rows(packed: PackedTrajectory, sequences: Sequence[ScoredTrajectory]) -> list[Row]:
    values = torch.rand(packed.targets.numel())
    reference = [s.ref_logprobs for s in sequences if s.ref_logprobs is not None]
    found = time_rows(
        "unpack response logprobs",
        best_times(
            {
                "loop over boundaries, copied": lambda: _unpack_loop(packed, values),
                "split, then a copy of each": lambda: [p.clone() for p in values.split(packed.response_lens.tolist())],
                "unpack_response_logprobs": lambda: unpack_response_logprobs(packed, values),
            }
        ),
        "loop over boundaries, copied",
    )
    whole = best_times({"unpack_sequences": lambda: unpack_sequences(packed)})
    found.append(Row("unpack 1,000 x 512 tokens", "unpack_sequences", whole["unpack_sequences"], "ms", "all fields"))
    cat = best_times({"torch.cat": lambda: torch.cat(reference)})
    found.append(Row("concatenate reference logprobs", "torch.cat", cat["torch.cat"], "ms", "part of pack_sequences"))
    return found


def _unpack_loop(packed: PackedTrajectory, values: Tensor) -> list[Tensor]:
    """Slice each sequence, reading its boundaries from the tensor."""
    parts, start = [], 0
    for index in range(packed.num_sequences):
        end = start + int(packed.response_lens[index].item())
        parts.append(values[start:end].clone())
        start = end
    return parts


def _pack_lists(samples: list[dict[str, list]], names: dict[str, torch.dtype]) -> dict[str, Tensor]:
    """Pack in the common way: extend Python lists, convert at the end."""
    flat: dict[str, list] = {name: [] for name in names}
    positions: list[int] = []
    boundaries = [0]
    for sample in samples:
        for name, values in flat.items():
            values.extend(sample[name])
        positions.extend(range(len(sample["tokens"])))
        boundaries.append(boundaries[-1] + len(sample["tokens"]))
    packed = {name: torch.tensor(flat[name], dtype=dtype) for name, dtype in names.items()}
    packed["position_ids"] = torch.tensor(positions, dtype=torch.int)
    packed["cu_seqlens"] = torch.tensor(boundaries, dtype=torch.int32)
    return packed


def _as_lists(sequence: ScoredTrajectory) -> dict[str, list]:
    tokens = torch.cat([sequence.prompt_tokens, sequence.response_tokens]).tolist()
    more = {name: getattr(sequence, name).tolist() for name in LOGPROBS}
    return {
        **more,
        "tokens": tokens,
        "loss_mask": sequence.loss_mask.int().tolist(),
        "advantages": sequence.advantages.expand(sequence.response_len).tolist(),
    }


def _without_logprobs(sequence: ScoredTrajectory) -> ScoredTrajectory:
    """Return a copy with tokens, mask and advantage only, the inputs of the list-based form."""
    return replace(sequence, logprobs=None, ref_logprobs=None, old_logprobs=None, weight_versions=None)


def _tensors(packed: PackedTrajectory) -> list[Tensor]:
    values: list[Any] = [getattr(packed, name) for name in packed.__dataclass_fields__]
    return [value for value in values if isinstance(value, Tensor)]


def _trajectory(index: int) -> ScoredTrajectory:
    generator = torch.Generator().manual_seed(index)

    def logprobs() -> Tensor:
        return -torch.rand(RESPONSE_LEN, generator=generator)

    return ScoredTrajectory(
        prompt_tokens=torch.randint(0, 32000, (PROMPT_LEN,), generator=generator),
        response_tokens=torch.randint(0, 32000, (RESPONSE_LEN,), generator=generator),
        prompt_len=PROMPT_LEN,
        response_len=RESPONSE_LEN,
        logprobs=logprobs(),
        ref_logprobs=logprobs(),
        old_logprobs=logprobs(),
        rewards=torch.rand(1, generator=generator),
        advantages=torch.randn((), generator=generator),
        successes=torch.ones(1),
        answer="",
        sequence_id=str(index),
        group_id=index // 8,
        reward_metadata={},
        policy_version=0,
        loss_mask=torch.rand(RESPONSE_LEN, generator=generator) > 0.1,
        weight_versions=torch.zeros(RESPONSE_LEN, dtype=torch.int64),
    )
