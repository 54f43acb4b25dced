"""Context-parallel layouts: each rank's part against loops, and the exact inverse."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slime_like.algorithms import (
    pack_sequences,
    padded_length,
    response_tokens,
    split_for_context_parallel,
)
from slime_like.trajectory import PackedTrajectory
from tests.support.properties import examples
from tests.support.shards import local_boundaries
from tests.unit.algorithms.cases import CP_SIZES, LAYOUTS, PADDINGS, SHAPES, batch, shapes


def pack(shapes: list[tuple[int, int]], padding: int = 0) -> PackedTrajectory:
    return pack_sequences(batch(shapes), target_tokens_per_batch=sum(p + r for p, r in shapes) + padding)


@given(shapes=shapes(), padding=PADDINGS, cp=CP_SIZES, layout=LAYOUTS, multiple=st.integers(1, 4))
@examples(60)
def test_split_and_merge_are_inverse(shapes, padding, cp, layout, multiple) -> None:  # type: ignore[no-untyped-def]
    packed = pack(shapes, padding)
    shards = [split_for_context_parallel(packed, cp, rank, layout, multiple) for rank in range(cp)]
    lengths = {shard.tokens.numel() for shard in shards}
    assert len(lengths) == 1 and lengths.pop() % multiple == 0
    # Every token of the pack is on exactly one rank, with its position.
    sources = torch.cat([shard.source for shard in shards])
    assert sources[sources >= 0].sort().values.tolist() == list(range(packed.packed_seq_len))
    for shard in shards:
        real = shard.source >= 0
        assert torch.equal(shard.tokens[real], packed.tokens[shard.source[real]]) and not shard.tokens[~real].any()
        assert torch.equal(shard.position_ids[real], packed.position_ids[shard.source[real]])
        # The logit that scores a response token is one position before it, on any rank.
        scored = packed.tokens[shard.source[shard.response_index] + 1]
        assert torch.equal(scored, response_tokens(packed)[shard.response_slot])
    values = [shard.response_slot.double() for shard in shards]
    slots = torch.cat([shard.response_slot for shard in shards])  # every response token, once
    assert slots.sort().values.tolist() == list(range(packed.targets.numel()))
    merged = sum(s.scatter(v) for s, v in zip(shards, values, strict=True))
    assert isinstance(merged, torch.Tensor) and merged.tolist() == list(range(packed.targets.numel()))


@given(shapes=shapes(8, 60), padding=st.integers(0, 9), cp=st.integers(2, 5))
@examples(30)
def test_zigzag_written_out_by_loops(shapes: list[tuple[int, int]], padding: int, cp: int) -> None:
    """Each padded segment has 2 * cp chunks. Rank r holds chunks r and 2 * cp - 1 - r of every segment."""
    packed = pack(shapes, padding)
    segments = [p + r for p, r in shapes] + ([padding] if padding else [])
    cu = packed.cu_seqlens.tolist()
    for rank in range(cp):
        shard = split_for_context_parallel(packed, cp, rank)
        source, positions, boundaries = [], [], [0]
        for start, length in zip(cu, segments, strict=False):
            padded = padded_length(length, cp)
            boundaries.append(boundaries[-1] + padded)
            chunk = padded // (2 * cp)
            for part in (rank, 2 * cp - 1 - rank):
                for offset in range(part * chunk, (part + 1) * chunk):
                    source.append(start + offset if offset < length else -1)
                    positions.append(offset)
        assert shard.source.tolist() == source
        assert shard.position_ids.tolist() == positions
        assert shard.cu_seqlens_padded.tolist() == boundaries
        assert local_boundaries(shard).tolist() == [b // cp for b in boundaries]
        assert shard.cu_seqlens.tolist() == cu
        assert shard.max_seqlen_padded == max(b - a for a, b in pairwise(boundaries))


def test_a_padded_length() -> None:
    assert [padded_length(5, 2), padded_length(8, 2), padded_length(5, 1)] == [8, 8, 5]
    assert padded_length(5, 2, "contiguous") == 5


@pytest.mark.parametrize(("multiple", "total"), [(1, 32), (3, 36)])
def test_contiguous_pads_only_the_total(multiple: int, total: int) -> None:
    packed = pack(SHAPES)  # 30 tokens
    shards = [split_for_context_parallel(packed, 4, rank, "contiguous", multiple) for rank in range(4)]
    source = torch.cat([shard.source for shard in shards]).tolist()
    assert source == [*range(30), *[-1] * (total - 30)]
    assert shards[0].cu_seqlens_padded.tolist() == [*packed.cu_seqlens.tolist(), total]
    assert local_boundaries(shards[1]).tolist() == [0, 0, 1, 8, 8, 8, 8] if multiple == 1 else True
    assert torch.cat([shard.position_ids for shard in shards])[30:].tolist() == list(range(total - 30))


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_one_rank_changes_nothing(layout: str) -> None:
    packed = pack(SHAPES, 5)
    shard = split_for_context_parallel(packed, 1, 0, layout)  # type: ignore[arg-type]
    assert torch.equal(shard.tokens, packed.tokens) and torch.equal(shard.position_ids, packed.position_ids)
    assert shard.cu_seqlens_padded.tolist() == [0, 7, 9, 16, 25, 30, 35]
