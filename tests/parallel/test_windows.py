"""Attention sinks and sliding windows agree with softmax attention written out in float64, on one rank and on two."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from backends.common.attention.choice import AnyAttention
from backends.common.attention.kernels import Segments
from backends.common.attention.packed_attention import LocalAttention
from backends.common.attention.prefixes import PrefixAttention
from backends.common.attention.ring import RingAttention, RingSegments
from backends.common.attention.ring_flash_attn import Llama3Segments, RingFlashAttention
from slime_like.errors import TrainerError
from slime_like.interfaces import RankPlacement
from tests.parallel.dense import assert_near, boundaries, dense_results
from tests.parallel.ranks import run_ranks
from tests.parallel.ring_steps import zigzag_rows

HEADS, GROUPS, WIDTH, SCALE, BOUND = 4, 2, 8, 0.3, 1e-12
# The border of two ranks lies at token 16: inside a sequence, between two, inside one that fills most of both.
PACKS = ([5, 15, 12], [9, 7, 4, 12], [31, 1])
WINDOWS = (None, 1, 2, 4, 11, 40)
RING = [8, 20, 4]


def _problem() -> list[Tensor]:
    """Return queries, keys, values, sinks and the output's gradient of a pack of 32 tokens."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(32, HEADS, WIDTH), (32, GROUPS, WIDTH), (32, GROUPS, WIDTH), (HEADS,), (32, HEADS, WIDTH)]
    return [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]


def _expected(lengths: list[int], window: int | None) -> list[Tensor]:
    q, k, v, sinks, grad = _problem()
    out, _, *grads = dense_results(q, k, v, grad, lengths, SCALE, sinks=sinks, window=window)
    return [out, *grads]


def _run(attention: AnyAttention, rows: Tensor, window: int | None) -> list[Tensor]:
    """Return the output of ``rows`` and the gradients of q, k, v and sinks."""
    q, k, v, sinks, grad = _problem()
    leaves = [x.requires_grad_() for x in (q[rows], k[rows], v[rows], sinks)]
    out = attention.attend(*leaves[:3], SCALE, leaves[3], window)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad[rows])]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("lengths", PACKS)
def test_on_one_rank(lengths: list[int], window: int | None) -> None:
    attention = LocalAttention(Segments.of(boundaries(lengths)))
    assert_near(_run(attention, torch.arange(32), window), _expected(lengths, window), BOUND)


def _on_ranks(placement: RankPlacement) -> tuple[list[list[Tensor]], list[Tensor], list[str]]:
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{placement.master_address}:{placement.master_port}",
        rank=placement.rank,
        world_size=placement.world_size,
    )
    group = dist.group.WORLD
    assert group is not None
    part = range(16 * placement.rank, 16 * placement.rank + 16)
    found = []
    for lengths in PACKS:
        attention = PrefixAttention.of(boundaries(lengths), None, part, group)
        found += [_run(attention, torch.tensor(part), window) for window in WINDOWS]
    rows = zigzag_rows(RING, 2, placement.rank)
    ring = RingAttention(RingSegments.of(boundaries(RING), 2), group)
    shared = PrefixAttention.of(boundaries([16, 16]), torch.tensor([-1, 0]), part, group)
    package = RingFlashAttention(Llama3Segments.of(boundaries([32]), placement.rank, 2), group)
    codes = []
    for attention, window in ((ring, 4), (shared, 4), (package, 4), (package, None)):
        with pytest.raises(TrainerError) as caught:
            _run(attention, rows, window)
        codes.append(caught.value.code)
    return found, _run(ring, rows, None), codes


def test_over_two_ranks(tmp_path: Path) -> None:
    """Gathered keys support both, a ring supports sinks; all other combinations are rejected."""
    results = run_ranks(_on_ranks, 2, tmp_path)
    cases = [(lengths, window) for lengths in PACKS for window in WINDOWS]
    for (lengths, window), *parts in zip(cases, *(found for found, *_ in results), strict=True):
        assert_near(_whole(parts, slice(None)), _expected(lengths, window), BOUND)
    order = torch.cat([zigzag_rows(RING, 2, rank) for rank in range(2)]).argsort()
    assert_near(_whole([ring for _, ring, _ in results], order), _expected(RING, None), BOUND)
    rejected = [*["windows-not-supported"] * 3, "sinks-not-supported"]
    assert [codes for *_, codes in results] == [rejected] * 2


def _whole(parts: list[list[Tensor]], order: slice | Tensor) -> list[Tensor]:
    """Concatenate the ranks' tokens, and sum their gradients of the sinks."""
    *tokens, sinks = zip(*parts, strict=True)
    return [*(torch.cat(each)[order] for each in tokens), torch.stack(sinks).sum(0)]
