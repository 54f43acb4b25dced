"""Splits of a batch: context-parallel layouts against loops, and partitions into micro-batches."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from slime_like.algorithms import (
    pack_sequences,
    padded_length,
    partition_by_tokens,
    partition_full_batches,
    response_tokens,
    split_for_context_parallel,
)
from slime_like.algorithms.packing.partition import balance, first_fit_decreasing, training_flops
from slime_like.examples.tiny_model import make_tiny_model
from slime_like.models.dimensions import ModelDimensions
from slime_like.trajectory import PackedTrajectory
from tests.support.properties import examples
from tests.support.shards import local_boundaries
from tests.unit.algorithms.cases import CP_SIZES, LAYOUTS, PADDINGS, SHAPES, batch, shapes


def pack(shapes: list[tuple[int, int]], padding: int = 0) -> PackedTrajectory:
    return pack_sequences(batch(shapes), target_tokens_per_batch=sum(p + r for p, r in shapes) + padding)


@given(shapes=shapes(), padding=PADDINGS, cp=CP_SIZES, layout=LAYOUTS, multiple=st.integers(1, 4))
@examples(30)
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


@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=200), ranks=st.integers(1, 9), extra=st.integers(0, 900)
)
@examples(30)
def test_every_sequence_once_and_every_rank_served(lengths: list[int], ranks: int, extra: int) -> None:
    budget = max(lengths) + extra
    if len(lengths) < ranks:
        with pytest.raises(ValueError, match="at least one"):
            partition_by_tokens(lengths, budget, ranks)
        return
    partition = partition_by_tokens(lengths, budget, ranks)
    assert len(partition) == ranks and all(bins and all(bins) for bins in partition)
    assert sorted(i for bins in partition for batch in bins for i in batch) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in batch) <= budget for bins in partition for batch in bins)
    # Counts differ only if nothing is left to split: every sequence has a micro-batch.
    assert len({len(bins) for bins in partition}) == 1 or all(len(batch) == 1 for bins in partition for batch in bins)


def differenced(costs: list[int], parts: int) -> list[int]:
    """Return the sums of the largest differencing method: the largest spread first, then the larger sum."""
    partials = [[cost] + [0] * (parts - 1) for cost in costs]
    while len(partials) > 1:
        partials.sort(key=lambda sums: (sums[-1] - sums[0], -sum(sums)))
        first, second, *rest = partials
        merged = sorted((x + y for x, y in zip(first, reversed(second), strict=True)), reverse=True)
        partials = [*rest, merged]
    return sorted(partials[0])


@given(costs=st.lists(st.integers(1, 6), min_size=5, max_size=14), parts=st.integers(2, 5))
@example(costs=[6, 5, 3, 3, 3, 2, 2, 2], parts=3)  # 8, 8, 10 if the partial made first were merged first
@examples(30)
def test_equal_spreads_are_merged_from_the_larger_sum(costs: list[int], parts: int) -> None:
    shares = balance(costs, parts)
    assert sorted(sum(costs[i] for i in share) for share in shares) == differenced(costs, parts)


@given(lengths=st.lists(st.integers(1, 64), min_size=4, max_size=40), ranks=st.integers(1, 4), by_cost=st.booleans())
@example(lengths=[27, 27, 23, 62], ranks=2, by_cost=False)
@example(lengths=[60, 60, 60], ranks=2, by_cost=False)  # no equal counts
@examples(30)
def test_equal_counts_if_there_are_enough_sequences(lengths: list[int], ranks: int, by_cost: bool) -> None:
    costs = [float(n * n) for n in lengths] if by_cost else None
    possible = -(-len(first_fit_decreasing(lengths, 64)) // ranks) * ranks <= len(lengths)
    partition = partition_by_tokens(lengths, 64, ranks, costs=costs)
    assert (len({len(bins) for bins in partition}) == 1) or not possible
    assert sorted(i for bins in partition for batch in bins for i in batch) == list(range(len(lengths)))
    assert all(batch and sum(lengths[i] for i in batch) <= 64 for bins in partition for batch in bins)


def test_bins_and_shares_of_known_optima() -> None:
    """Johnson's example: 7, 6, 4, 3, 2, 2 in bins of 8."""
    lengths = [4, 7, 2, 6, 3, 2]
    bins = first_fit_decreasing(lengths, 8)
    assert [[lengths[i] for i in members] for members in bins] == [[7], [6, 2], [4, 3], [2]]
    torch.manual_seed(0)
    for lengths in (torch.randint(1, 4096, (2000,)), torch.randn(2000).mul(0.8).add(6).exp().clamp(1, 4096).long()):
        for ranks in (2, 8, 64, 300):
            loads = [sum(lengths[i] for i in part) for part in balance(lengths.tolist(), ranks)]
            assert max(loads) <= 1.02 * sum(loads) / ranks + lengths.max() * (ranks > 64)


def test_balance_by_flops_differs_from_tokens() -> None:
    lengths = [4096] + [256] * 24
    flops = training_flops(lengths, attention_width=64, active_parameters=100_000, num_layers=4)
    assert flops[0] == 6 * 100_000 * 4096 + 6 * 4 * 64 * 4096**2

    def imbalance(costs: list[float] | None) -> float:
        shares = [[i for batch in bins for i in batch] for bins in partition_by_tokens(lengths, 4096, 2, costs=costs)]
        loads = [sum(flops[i] for i in share) for share in shares]
        return max(loads) / min(loads)

    assert imbalance(flops) < imbalance(None)
    # Equal counts move little: the rank with the long sequence gets the cheapest of the others.
    partition = partition_by_tokens(lengths, 4096, 2, costs=flops)
    assert sorted(sum(map(len, bins)) for bins in partition) == [2, 23]


def test_flops_match_torchs_count(tmp_path: Path) -> None:
    """Hugging Face's eager attention computes all of L x L, so the half that causality saves is added."""
    make_tiny_model(tmp_path, num_hidden_layers=2, hidden_size=32, intermediate_size=48, vocab_size=264)
    network = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    model = ModelDimensions.from_checkpoint(tmp_path)
    width, lengths = model.num_heads * model.head_dim, [40, 7]
    with FlopCounterMode(display=False) as counter:
        for length in lengths:
            network(input_ids=torch.arange(length)[None], use_cache=False).logits.sum().backward()
    flops = sum(training_flops(lengths, width, model.active_parameters, model.attention_layers))
    saved = 6 * model.attention_layers * width * sum(length**2 for length in lengths)
    assert counter.get_total_flops() == pytest.approx(flops + saved, rel=2e-3)


def test_tensors_are_accepted() -> None:
    lengths, costs = [5, 3, 4, 2], [1.0, 9.0, 1.0, 1.0]
    expected = partition_by_tokens(lengths, 8, 2, costs=costs)
    assert partition_by_tokens(torch.tensor(lengths), 8, 2, costs=torch.tensor(costs)) == expected
    assert partition_full_batches(torch.tensor(lengths), 8, 1) == partition_full_batches(lengths, 8, 1)
    assert training_flops(torch.tensor(lengths), 2, 3, 4) == training_flops(lengths, 2, 3, 4)


@given(lengths=st.lists(st.integers(1, 20), max_size=60), ranks=st.integers(1, 4))
@examples(30)
def test_full_batches(lengths: list[int], ranks: int) -> None:
    partition = partition_full_batches(lengths, 20, ranks)
    sent = [i for bins in partition for members in bins for i in members]
    assert sorted(sent) == list(range(len(sent)))
    assert len({len(bins) for bins in partition}) == 1
    for bins in partition:
        for members in bins:
            assert sum(lengths[i] for i in members) <= 20 < sum(lengths[i] for i in [*members, members[-1] + 1])


def test_micro_batches_are_few_even_and_within_the_budget() -> None:
    """First-fit-decreasing alone would fill the first one and leave the second one almost empty."""
    lengths = [70, 62] * 64 + [58, 13] * 3 + [19]
    (bins,) = partition_by_tokens(lengths, 8192, 1)
    loads = sorted(sum(lengths[i] for i in batch) for batch in bins)
    assert len(bins) == len(first_fit_decreasing(lengths, 8192)) == 2
    assert loads[1] - loads[0] <= 1 and sum(loads) == sum(lengths)
    # Differencing splits [8, 7, 6, 5, 4] into 14 and 16, but only 15 and 15 fit.
    assert max(sum((8, 7, 6, 5, 4)[i] for i in part) for part in balance([8, 7, 6, 5, 4], 2)) == 16
    (bins,) = partition_by_tokens([8, 7, 6, 5, 4], 15, 1)
    assert sorted(sum((8, 7, 6, 5, 4)[i] for i in batch) for batch in bins) == [15, 15]
