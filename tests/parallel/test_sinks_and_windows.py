"""Attention with sinks and sliding windows agrees with the softmax written out in float64, alone and over ranks."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from backends.common.attention import AnyAttention, choose_attention
from backends.common.attention.kernels import Segments
from backends.common.attention.packed_attention import LocalAttention
from backends.common.attention.prefixes import PrefixAttention
from slime_like.algorithms.context import ContextShard
from slime_like.errors import TrainerError
from slime_like.interfaces import RankPlacement
from tests.parallel.dense import assert_near, boundaries, dense_results, relative_error, zigzag_rows
from tests.parallel.ranks import run_ranks
from tests.support.rejections import Rejects

HEADS, GROUPS, WIDTH, SCALE, WINDOW = 4, 2, 16, 0.3, 5
LENGTHS = [12, 28, 4, 20]  # multiples of four, as a ring of two needs; the middle of 64 is inside the third


def _problem() -> tuple[list[Tensor], Tensor, Tensor]:
    """Return queries, keys and values, the output's gradient, and sinks, one of which takes nearly everything."""
    generator = torch.Generator().manual_seed(1)
    q, k, v, grad = (
        torch.randn(sum(LENGTHS), heads, WIDTH, generator=generator) for heads in (HEADS, GROUPS, GROUPS, HEADS)
    )
    return [q, k, v], grad, torch.tensor([0.5, -2.0, 6.0, -40.0])


def _written_out(window: int | None, has_sinks: bool) -> list[Tensor]:
    """Return output and gradients of queries, keys, values and sinks."""
    inputs, grad, sinks = _problem()
    out, _, *gradients = dense_results(*inputs, grad, LENGTHS, SCALE, sinks=sinks if has_sinks else None, window=window)
    return [out, *gradients]


def _attended(attention: AnyAttention, rows: Tensor | slice, window: int | None, has_sinks: bool) -> list[Tensor]:
    inputs, grad, sinks = _problem()
    leaves = [x[rows].clone().requires_grad_() for x in inputs]
    given = [sinks.requires_grad_()] if has_sinks else []
    out = attention.attend(*leaves, SCALE, window, *given)
    return [out.detach(), *torch.autograd.grad(out, [*leaves, *given], grad[rows])]


CASES = [(None, True), (WINDOW, False), (WINDOW, True), (1, True), (28, True), (27, False)]


@pytest.mark.parametrize(("window", "has_sinks"), CASES)
def test_one_rank_computes_the_softmax(window: int | None, has_sinks: bool) -> None:
    attention = LocalAttention(Segments.of(boundaries(LENGTHS)))
    assert_near(_attended(attention, slice(None), window, has_sinks), _written_out(window, has_sinks), 2e-6)


def _of_ranks(placement: RankPlacement) -> tuple[list[list[Tensor]], list[list[Tensor]], list[str]]:
    """Return the all-gather's results, the ring's with sinks only, and the codes of errors."""
    rank = placement.rank
    address = f"tcp://{placement.master_address}:{placement.master_port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    half, group = sum(LENGTHS) // 2, dist.group.WORLD
    assert group is not None
    rows = torch.zeros(half, dtype=torch.int64)
    shard = ContextShard(
        tokens=rows, position_ids=rows, source=rows, cu_seqlens=boundaries(LENGTHS), response_index=rows,
        cu_seqlens_padded=boundaries(LENGTHS), max_seqlen_padded=max(LENGTHS), parents=None, response_slot=rows,
        num_responses=half, layout="contiguous", cp_size=2, cp_rank=rank,
    )  # fmt: skip
    gather, ring_attention = (choose_attention(name, shard, group) for name in ("allgather", "ring"))
    mine, zigzag = slice(rank * half, rank * half + half), zigzag_rows(LENGTHS, 2, rank)
    gathered = [_attended(gather, mine, *case) for case in CASES]
    ring = [_attended(ring_attention, zigzag, window, True) for window in (None, 28)]
    package, codes = choose_attention("ring_flash_attn", shard, group), []
    for attention, case in ((ring_attention, (WINDOW, False)), (package, (WINDOW, False)), (package, (None, True))):
        with pytest.raises(TrainerError) as caught:
            _attended(attention, zigzag, *case)
        codes.append(caught.value.code)
    return gathered, ring, codes


def test_context_ranks_compute_the_softmax(tmp_path: Path) -> None:
    """The border of the ranks is inside a sequence; a window reaches over it. Sinks' gradients are sums over ranks."""
    results = run_ranks(_of_ranks, 2, tmp_path)
    for index, case in enumerate(CASES):
        parts = [gathered[index] for gathered, _, _ in results]
        found = [torch.cat(each) for each in zip(*(part[:4] for part in parts), strict=True)]
        found += [parts[0][4] + parts[1][4]] if case[1] else []
        assert_near(found, _written_out(*case), 2e-6)
    order = torch.cat([zigzag_rows(LENGTHS, 2, rank) for rank in (0, 1)])
    for index in (0, 1):
        expected = _written_out(None, True)
        for place in range(4):
            found_rows = torch.cat([ring[index][place] for _, ring, _ in results])
            assert relative_error(found_rows, expected[place][order]) < 2e-6
        assert relative_error(sum(ring[index][4] for _, ring, _ in results), expected[4]) < 2e-6
    assert [codes for *_, codes in results] == [["attention-not-shared"] * 3] * 2


@pytest.mark.parametrize("window", [31, 32])
def test_shared_prefixes_exclude_windows_shorter_than_a_whole_sequence(window: int, rejects: Rejects) -> None:
    """The longest sequence has 32 tokens in three segments, the longest segment 28."""
    group: Any = SimpleNamespace(size=lambda: 1)
    cu_seqlens, parents = boundaries([2, 2, 28, 4, 28]), torch.tensor([-1, 0, 1, -1, 3])
    attention = PrefixAttention.of(cu_seqlens, parents, range(sum(LENGTHS)), group)
    if window == 32:
        found, everything = (_attended(attention, slice(None), each, False) for each in (window, None))
        assert all(torch.equal(one, other) for one, other in zip(found, everything, strict=True))
        return
    with rejects(TrainerError, "prefixes-not-supported"):
        _attended(attention, slice(None), window, False)
